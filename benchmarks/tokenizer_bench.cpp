// Encoding speed on one core in bytes of text a second (bytes_per_second). The official DeepSeek-V3
// tokenizer if it lies beside the repository, else a small one. The encoder keeps nothing between
// calls, so repeating a text is no advantage.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "text/tokenizer.h"

namespace {

namespace fs = std::filesystem;
using tandem::Tokenizer;

constexpr size_t kTextBytes = 1 << 20;
const fs::path kRoot = TANDEM_SOURCE_DIR;

fs::path tokenizer_directory() {
  const fs::path official = kRoot / "../shared/vectors/deepseek_v3_tokenizer";
  return fs::exists(official) ? official : kRoot / "tests/data/tokenizer/v3";
}

// The files below `folders` whose names end in one of `endings`, one after the other, at most
// kTextBytes.
std::string files(const std::vector<const char*>& folders,
                  const std::vector<std::string>& endings) {
  std::vector<fs::path> paths;
  for (const char* folder : folders)
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / folder))
      if (std::count(endings.begin(), endings.end(), entry.path().extension()) > 0)
        paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::ostringstream text;
  for (const fs::path& path : paths) text << std::ifstream(path).rdbuf();
  const std::string all = text.str();
  size_t end = std::min(all.size(), kTextBytes);
  while (end < all.size() && (static_cast<unsigned char>(all[end]) & 0xC0) == 0x80) --end;
  return all.substr(0, end);
}

std::string code() { return files({"src", "cpu_kernels", "offload", "tests"}, {".cpp", ".h"}); }

// The pages of the repository, and the comments of its code.
std::string english() {
  std::string text = files({"docs", "tests", "models", "tools"}, {".md"});
  std::istringstream lines(code());
  for (std::string line; std::getline(lines, line);)
    if (const size_t comment = line.find("// "); comment != std::string::npos)
      text += line.substr(comment + 3) + '\n';
  return text;
}

// Sentences of random words: the tokenizer's own Chinese tokens, the early (frequent) ones more
// often. Harder than real text, where neighbouring words make longer known pieces.
std::string chinese(const Tokenizer& tokenizer) {
  std::vector<std::string> words;
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    const std::string_view word = tokenizer.bytes_of(id);
    bool is_chinese = !word.empty() && tandem::find_invalid_utf8(word) == std::string_view::npos;
    for (size_t at = 0; is_chinese && at < word.size();) {
      const tandem::CodePoint c = tandem::decode_utf8(word, at);
      is_chinese = c.value >= 0x4E00 && c.value <= 0x9FA5;
      at += c.n_bytes;
    }
    if (is_chinese) words.emplace_back(word);
  }
  std::mt19937 random(1);
  std::uniform_real_distribution<double> uniform(0, 1);
  std::string text;
  while (text.size() < kTextBytes) {
    const double u = uniform(random);
    text += words[static_cast<size_t>(u * u * static_cast<double>(words.size()))];
    const auto end = random() % 100;
    text += end < 9 ? "，" : end < 13 ? "。" : end < 14 ? "\n" : "";
  }
  return text;
}

// Lines of each in turn.
std::string mixed(const Tokenizer& tokenizer) {
  std::istringstream sources[] = {std::istringstream(english()), std::istringstream(code()),
                                  std::istringstream(chinese(tokenizer))};
  std::string text, line;
  for (size_t i = 0; text.size() < kTextBytes && std::getline(sources[i % 3], line); ++i)
    text += line + '\n';
  return text;
}

void encode(benchmark::State& state, const Tokenizer& tokenizer, const std::string& text) {
  size_t n_tokens = 0;
  for (auto _ : state) {
    const std::vector<int32_t> ids = tokenizer.encode(text);
    n_tokens = ids.size();
    benchmark::DoNotOptimize(ids.data());
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(text.size()));
  state.counters["text_bytes"] = static_cast<double>(text.size());
  state.counters["bytes_per_token"] =
      static_cast<double>(text.size()) / static_cast<double>(n_tokens);
}

void load(benchmark::State& state) {
  for (auto _ : state)
    benchmark::DoNotOptimize(Tokenizer::from_directory(tokenizer_directory()).vocab_size());
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  const Tokenizer tokenizer = Tokenizer::from_directory(tokenizer_directory());
  benchmark::AddCustomContext("tokenizer", tokenizer_directory().filename().string());
  const std::pair<const char*, std::string> texts[] = {{"english", english()},
                                                       {"cpp", code()},
                                                       {"chinese", chinese(tokenizer)},
                                                       {"mixed", mixed(tokenizer)}};
  for (const auto& [name, text] : texts)
    benchmark::RegisterBenchmark((std::string("encode/") + name).c_str(),
                                 [&](benchmark::State& state) { encode(state, tokenizer, text); });
  benchmark::RegisterBenchmark("load", load)->Unit(benchmark::kMillisecond);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
