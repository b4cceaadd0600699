// Splits template source into tokens, with the whitespace rules of trim_blocks and lstrip_blocks.
#pragma once
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
  kSign,  // an operator or bracket
  kEnd,
};

struct Token {
  TokenKind kind;
  int line;
  std::string text;
  Value number = {};

  bool is_name(std::string_view name) const { return kind == TokenKind::kName && text == name; }
  bool is_sign(std::string_view sign) const { return kind == TokenKind::kSign && text == sign; }
};

// The last token is kEnd. Throws Error naming the line.
std::vector<Token> tokenize(std::string_view source);

// Throws Error "chat template line N: ..".
template <class... Args>
[[noreturn]] void fail_at(int line, fmt::format_string<Args...> message, Args&&... args) {
  fail("chat template line {}: {}", line, fmt::format(message, std::forward<Args>(args)...));
}

}  // namespace tandem::jinja
