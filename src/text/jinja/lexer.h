// Splits template source into tokens, with the whitespace rules of trim_blocks and lstrip_blocks.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/jinja/value.h"

namespace tandem::jinja {

enum class TokenKind {
  kText,        // outside of tags
  kPrintBegin,  // {{
  kPrintEnd,
  kBlockBegin,  // {%
  kBlockEnd,
  kName,
  kString,  // `text` is decoded
  kInteger,
  kReal,
  kSymbol,  // an operator or bracket
  kEnd,
};

struct Token {
  TokenKind kind;
  int line;
  std::string text;
  Value number = {};

  bool is_name(std::string_view name) const { return kind == TokenKind::kName && text == name; }
  bool is_symbol(std::string_view symbol) const {
    return kind == TokenKind::kSymbol && text == symbol;
  }
};

// The last token is kEnd. Throws Error naming the line.
std::vector<Token> tokenize(std::string_view source);

// Throws Error "chat template line N: ..".
template <class... Args>
[[noreturn]] void fail_at(int line, fmt::format_string<Args...> message, Args&&... args) {
  fail("chat template line {}: {}", line, fmt::format(message, std::forward<Args>(args)...));
}

// Decodes literals of the template language: strings with Python's escapes, integers and floats.
// Decodes the text between the quotes. nullopt when an escape is not a character.
std::optional<std::string> decode_string_literal(std::string_view text);

// Length of the number at the beginning of `text`. If `may_be_real` is false, only the integer part
// is taken.
size_t number_length(std::string_view text, bool may_be_real);

// Accepts underscores between digits and the prefixes 0x, 0o, 0b. nullopt for an integer beyond 64
// bits, a float out of range, and anything that is not a number.
std::optional<Value> parse_number(std::string_view text);

// Accepts digits of `base` 2..36 without a prefix, an optional sign, and underscores between
// digits. nullopt for anything else.
std::optional<int64_t> parse_integer(std::string_view text, int base);
std::optional<double> parse_real(std::string_view text);

}  // namespace tandem::jinja
