// tiktoken.model: the tokenizer of Kimi-K2 and Moonlight.
#include <charconv>
#include <unordered_set>

#include "core/check.h"
#include "io/json.h"
#include "text/tokenizer_files.h"

namespace tandem {
namespace {

// The split pattern from the model's tokenization code; no data file contains it.
constexpr std::string_view kKimiPattern =
    R"([\p{Han}]+)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*)"
    R"([\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+)"
    R"([\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr int32_t kReservedTokens = 256;
constexpr size_t kMaxTokenBytes = 4096;  // bytes; the longest of Kimi-K2 has 128

std::string decode_base64(std::string_view text, size_t line);
void parse_line(std::string_view text, size_t line, std::vector<std::string>& tokens);
std::vector<AddedToken> reserved_tokens(int32_t first, const std::vector<AddedToken>& named);

}  // namespace

TokenizerParts parse_tiktoken(std::string_view file, const std::vector<AddedToken>& named) {
  TokenizerParts parts;
  std::vector<std::string>& tokens = parts.vocabulary.tokens;
  for (size_t line = 1; !file.empty(); ++line) {
    const size_t end = std::min(file.find('\n'), file.size());
    if (end > 0) parse_line(file.substr(0, end), line, tokens);
    file.remove_prefix(std::min(end + 1, file.size()));
  }
  require(!tokens.empty(), "it has no tokens");
  std::unordered_set<std::string_view> seen;
  for (size_t rank = 0; rank < tokens.size(); ++rank) {
    require(!tokens[rank].empty(), "the rank {} is missing", rank);
    require(seen.insert(tokens[rank]).second, "the token of rank {} occurs twice", rank);
  }
  parts.vocabulary.merges = merges_by_rank(tokens);
  parts.vocabulary.ignore_merges = true;
  parts.splits = {{std::string(kKimiPattern)}};
  parts.added_tokens = reserved_tokens(static_cast<int32_t>(tokens.size()), named);
  return parts;
}

namespace {

void parse_line(std::string_view text, size_t line, std::vector<std::string>& tokens) {
  if (text.ends_with('\r')) text.remove_suffix(1);
  const size_t space = text.find(' ');
  require(space != std::string_view::npos, "line {} is not \"base64 rank\"", line);
  const std::string_view digits = text.substr(space + 1);
  uint32_t rank = 0;
  const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
  require(parsed.ec == std::errc() && parsed.ptr == digits.data() + digits.size() &&
              rank < static_cast<uint32_t>(kMaxTokenIds - kReservedTokens),
          "line {}: the rank must be a number from 0 to {}", line,
          kMaxTokenIds - kReservedTokens - 1);
  std::string bytes = decode_base64(text.substr(0, space), line);
  require(!bytes.empty() && bytes.size() <= kMaxTokenBytes,
          "line {}: a token must have from 1 to {} bytes, not {}", line, kMaxTokenBytes,
          bytes.size());
  if (rank >= tokens.size()) tokens.resize(rank + 1);
  require(tokens[rank].empty(), "line {}: the rank {} occurs twice", line, rank);
  tokens[rank] = std::move(bytes);
}

// The added tokens, whose ids begin at `first`: all of `named`, and "<|reserved_token_N|>" for each
// of the first kReservedTokens ids without a name.
std::vector<AddedToken> reserved_tokens(int32_t first, const std::vector<AddedToken>& named) {
  std::vector<AddedToken> tokens = named;
  std::vector<bool> has_name(kReservedTokens);
  for (const AddedToken& token : named) {
    if (token.id < first)
      fail("the added token {} {} has the id of a rank", token.id, shown(token.text));
    if (token.id < first + kReservedTokens) has_name[static_cast<size_t>(token.id - first)] = true;
  }
  for (int32_t i = 0; i < kReservedTokens; ++i)
    if (!has_name[static_cast<size_t>(i)])
      tokens.push_back({first + i, fmt::format("<|reserved_token_{}|>", first + i), true});
  return tokens;
}

std::string decode_base64(std::string_view text, size_t line) {
  constexpr std::string_view kAlphabet =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  static_assert(kAlphabet.size() == 64);
  while (text.ends_with('=')) text.remove_suffix(1);
  std::string bytes;
  uint32_t bits = 0;
  int n_bits = 0;
  for (const char c : text) {
    const size_t digit = kAlphabet.find(c);
    require(digit != std::string_view::npos, "line {} is not base64", line);
    bits = bits << 6 | static_cast<uint32_t>(digit);
    n_bits += 6;
    if (n_bits < 8) continue;
    n_bits -= 8;
    bytes += static_cast<char>(bits >> n_bits & 0xFF);
  }
  return bytes;
}

}  // namespace
}  // namespace tandem
