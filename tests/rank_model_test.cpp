// A model on several ranks, which are threads here: golden logits, the embedded model's answers,
// and what each rank reads.
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>

#include "cli/conversation.h"
#include "cli/options.h"
#include "comm/agreement.h"
#include "comm/local_ranks.h"
#include "loader/loaded_model.h"
#include "tests/check_close.h"
#include "tests/error_of.h"
#include "tests/golden_file.h"
#include "tests/plain_engine.h"
#include "tests/repository.h"
#include "text/chat_format.h"

namespace tandem::test {
namespace {

ModelOptions on_rank(ModelOptions options, Group& group) {
  options.n_threads = 1;
  options.ranks = {&group, group.rank(), group.size()};
  return options;
}

// Runs `work` on every rank, which is numbered from 0.
void on_ranks(int n, const std::function<void(Group&)>& work) { run_local_ranks({n}, work); }

class RankModel : public testing::TestWithParam<std::string> {};

TEST_P(RankModel, HasTheGoldenLogits) {
  const std::string directory = kGolden + GetParam();
  const GoldenFile golden(directory + "/golden.safetensors");
  const ModelOptions options = {
      .directory = directory,
      // t1 has near ties between experts, which only float32 decides as the golden values do.
      .isa = GetParam() == "t1" ? std::optional(cpu::Isa::kReference) : std::nullopt,
      .context = 256,
      .max_logits = 64};
  for (const int n_ranks : {2, 3, 8}) {
    SCOPED_TRACE(n_ranks);
    std::vector<std::vector<float>> of_rank(n_ranks);
    on_ranks(n_ranks, [&](Group& group) {
      LoadedModel loaded(on_rank(options, group));
      for (const int length : {5, 17, 40}) {
        const std::string suffix = "_" + std::to_string(length);
        if (!golden.has("tokens" + suffix)) continue;
        const std::vector<float> want = golden.floats("logits" + suffix);
        const auto n_rows = std::ssize(want) / loaded.config().vocab;
        score(loaded.model(), loaded.cache(), golden.ints("tokens" + suffix), length - n_rows,
              [&](int64_t, std::span<const float> row) {
                std::vector<float>& all = of_rank[group.rank()];
                all.insert(all.end(), row.begin(), row.end());
              });
      }
    });
    std::vector<float> want;
    for (const int length : {5, 17, 40}) {
      const std::string name = "logits_" + std::to_string(length);
      if (!golden.has(name)) continue;
      const std::vector<float> logits = golden.floats(name);
      want.insert(want.end(), logits.begin(), logits.end());
    }
    ASSERT_FALSE(want.empty());
    expect_close(of_rank[0], want, (GetParam() == "t1" ? 2e-4 : 3e-2) * largest(want));
    for (int rank = 1; rank < n_ranks; ++rank) EXPECT_EQ(of_rank[rank], of_rank[0]) << rank;
  }
}

INSTANTIATE_TEST_SUITE_P(Families, RankModel, testing::ValuesIn(golden_families(kGolden)),
                         [](const auto& info_of) { return info_of.param; });

// Bytes that each of n ranks reads, and 0 ranks: those of a process alone.
std::vector<int64_t> bytes_read(int n, const std::string& family) {
  const ModelOptions options = {.directory = kGolden + family, .context = 64};
  if (n == 0) return {LoadedModel(options).load_report().bytes};
  std::vector<int64_t> bytes(n);
  on_ranks(n, [&](Group& group) {
    bytes[group.rank()] = LoadedModel(on_rank(options, group)).load_report().bytes;
  });
  return bytes;
}

// With n ranks, experts are read once and the backbone n times.
TEST(RankModels, ReadOnlyTheirExperts) {
  for (const char* family : {"v2_lite", "v3_fp8", "kimi_k2_thinking"}) {
    SCOPED_TRACE(family);
    const auto sum = [&](int n) {
      const std::vector<int64_t> bytes = bytes_read(n, family);
      return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
    };
    const int64_t alone = sum(0), backbone = sum(2) - alone;
    EXPECT_GT(backbone, 0);
    EXPECT_LT(backbone, alone);
    EXPECT_EQ(sum(3), alone + 2 * backbone);
    EXPECT_EQ(sum(8), alone + 7 * backbone);
  }
}

TEST(RankModels, GiveTheSameAnswers) {
  const std::string directory = kTinyR1;
  const Tokenizer tokenizer = Tokenizer::from_directory(directory);
  const ChatFormat format(directory, tokenizer);
  std::ifstream file(kRoot + "/tests/data/tiny_r1_questions.json");
  const nlohmann::json questions = nlohmann::json::parse(file);
  std::vector<Request> requests;
  for (const auto& q : questions) {
    if (TANDEM_SANITIZED && requests.size() == 8) break;
    GenerateOptions generate;
    generate.max_new_tokens = 160;
    generate.sampling.temperature = requests.size() % 2 == 0 ? 0 : 0.7f;
    generate.sampling.seed = requests.size();
    requests.push_back(make_request(
        generate, tokenizer, format.prompt(first_messages("", q["question"].get<std::string>()))));
  }
  ASSERT_GE(requests.size(), TANDEM_SANITIZED ? 8u : 240u);
  const auto texts = [&](const ModelOptions& options) {
    LoadedModel loaded(options);
    Engine engine = engine_for(loaded, tokenizer);
    std::vector<std::string> all;
    for (const Completion& c : complete(engine, requests))
      all.push_back(tokenizer.decode(c.tokens));
    return all;
  };
  for (const DraftChoice draft : {DraftChoice::kAuto, DraftChoice::kMtp}) {
    const ModelOptions options = {
        .directory = directory, .context = 8192, .max_logits = 16, .draft = draft};
    const std::vector<std::string> want = texts(options);
    std::vector<std::vector<std::string>> got(4);
    on_ranks(4, [&](Group& group) { got[group.rank()] = texts(on_rank(options, group)); });
    for (const std::vector<std::string>& of_rank : got) EXPECT_EQ(of_rank, want);
  }
}

// The message on the rank that reports it.
std::string refusal(int n, const std::function<ModelOptions(int rank)>& options) {
  std::mutex mutex;
  std::vector<std::string> reports;
  int n_refused = 0;
  on_ranks(n, [&](Group& group) {
    try {
      LoadedModel loaded(on_rank(options(group.rank()), group));
    } catch (const AgreedError& error) {
      const std::lock_guard lock(mutex);
      ++n_refused;
      EXPECT_FALSE(error.while_running);
      if (error.reported_here) reports.push_back(error.what());
    }
  });
  EXPECT_EQ(n_refused, n);
  EXPECT_EQ(reports.size(), 1u);
  return reports.empty() ? "" : reports[0];
}

TEST(RankModels, RefuseWhatRanksDoNotShare) {
  const ModelOptions usual = {.directory = kGolden + "v2_lite", .context = 64};
  const auto with = [&](auto change) {
    return refusal(3, [&](int rank) {
      ModelOptions options = usual;
      change(options, rank);
      return options;
    });
  };
  using Options = ModelOptions&;
  EXPECT_EQ(with([](Options o, int) { o.device = DeviceChoice::kCuda; }),
            "--device cuda: a model on several ranks is computed by their CPUs: use --device cpu");
  EXPECT_NE(with([](Options o, int) { o.placement = "p.json"; }).find("--placement"),
            std::string::npos);
  EXPECT_NE(with([](Options o, int rank) {
              if (rank == 2) o.isa = cpu::Isa::kReference;
            }).find("the CPU or model of rank 2 differs from that of rank 0: \"kernels reference"),
            std::string::npos);
  EXPECT_NE(with([](Options o, int rank) {
              if (rank == 1) o.directory = kGolden + "v3_fp8";
            }).find("the CPU or model of rank 1 differs"),
            std::string::npos);
  EXPECT_NE(with([](Options o, int rank) {
              if (rank == 1) o.directory = kGolden + "none";
            }).find("none"),
            std::string::npos);
}

}  // namespace
}  // namespace tandem::test
