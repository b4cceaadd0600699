// Arbitrary bytes as a tokenizer and a text. Input: a file, a zero byte, a text. The file is
// tokenizer.json if it begins with '{', one split pattern if it begins with '/', else
// tiktoken.model. The result is an Error of one line, or ids that decode to the whole text.
#include <algorithm>
#include <cstdint>
#include <string_view>

#include "core/check.h"
#include "io/json.h"
#include "text/tokenizer.h"

namespace {

using namespace tandem;

TokenizerParts parse(std::string_view file) {
  return file.starts_with('{') ? parse_tokenizer_json(parse_json(file, "tokenizer.json"))
                               : parse_tiktoken(file, {});
}

void try_tokenizer(std::string_view file, std::string_view text) {
  const TokenizerParts parts = parse(file);
  const bool keeps_all = std::none_of(parts.splits.begin(), parts.splits.end(),
                                      [](const SplitRule& rule) { return rule.remove_matches; });
  const Tokenizer tokenizer(parts, {});
  const ByteRange literal[] = {{text.size() / 4, text.size() / 2}};
  for (const EncodeOptions& options :
       {EncodeOptions{}, EncodeOptions{.added_tokens = false}, EncodeOptions{.literal = literal}}) {
    const std::vector<int32_t> ids = tokenizer.encode(text, options);
    const std::string decoded = tokenizer.decode(ids);
    check(!keeps_all || decoded == text, "decoding gives the text back");
  }
}

void try_pattern(std::string_view pattern, std::string_view text) {
  if (find_invalid_utf8(text) != std::string_view::npos) return;
  const PreTokenizer pre_tokenizer({{std::string(pattern)}});
  std::string pieces;
  pre_tokenizer.split(text, [&](std::string_view piece) { pieces += piece; });
  check(pieces == text, "the pieces are the text");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t end = std::min(input.find('\0'), size);
  try {
    const std::string_view file = input.substr(0, end),
                           text = input.substr(std::min(end + 1, size));
    file.starts_with('/') ? try_pattern(file.substr(1), text) : try_tokenizer(file, text);
  } catch (const Error& error) {
    check(std::string_view(error.what()).find('\n') == std::string_view::npos, "one line");
  }
  return 0;
}
