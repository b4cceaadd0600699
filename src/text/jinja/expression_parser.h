// Parses expressions of the template language, with Jinja's precedence.
#pragma once
#include <string_view>
#include <vector>

#include "text/jinja/lexer.h"
#include "text/jinja/syntax.h"

namespace tandem::jinja {

inline constexpr int kMaxNesting = 200;  // limits recursion, so that any thread's stack suffices

// Reads from `tokens`, whose last token is kEnd.
class ExpressionParser {
 public:
  explicit ExpressionParser(const std::vector<Token>& tokens) : tokens_(tokens) {}

  ExprPtr expression();  // not a tuple
  ExprPtr tuple_or_expression(bool conditional = true);
  ExprPtr filters_of_block();  // name|name(..), the filters of {% set x | .. %}
  ExprPtr target();            // target of an assignment: a | a, b | (a, b)
  ExprPtr set_target();        // a target() or name.attribute

  const Token& current() const { return tokens_[at_]; }
  bool skip_name(std::string_view name);
  bool skip_symbol(std::string_view symbol);
  void expect_symbol(std::string_view symbol);
  void expect(TokenKind kind, std::string_view what);
  std::string take_name();
  void advance() { at_ += current().kind != TokenKind::kEnd ? 1 : 0; }
  [[noreturn]] void fail_expected(std::string_view expected) const;

  // Counts one level of recursion during its lifetime; throws Error beyond kMaxNesting.
  class NestingGuard {
   public:
    explicit NestingGuard(ExpressionParser& parser);
    ~NestingGuard() { --parser_.depth_; }
    NestingGuard(const NestingGuard&) = delete;
    NestingGuard& operator=(const NestingGuard&) = delete;

   private:
    ExpressionParser& parser_;
  };

 private:
  ExprPtr make(ExprKind kind) const;
  ExprPtr with_parts(ExprPtr expr, std::vector<ExprPtr> parts) const;
  ExprPtr join(ExprKind kind, ExprPtr a, ExprPtr b) const;

  ExprPtr or_expression();
  ExprPtr and_expression();
  ExprPtr not_expression();
  ExprPtr comparison();
  bool take_comparison(Comparison& out);
  ExprPtr sum();
  ExprPtr concatenation();
  ExprPtr product();
  ExprPtr power();
  ExprPtr unary(bool with_filters = true);
  ExprPtr primary();
  ExprPtr parenthesized();
  ExprPtr list();
  ExprPtr dict();
  ExprPtr postfix(ExprPtr expr);
  ExprPtr filters(ExprPtr expr);
  ExprPtr filter(ExprPtr expr);
  ExprPtr test(ExprPtr expr);
  ExprPtr call(ExprPtr expr);
  ExprPtr attribute(ExprPtr expr);
  ExprPtr subscript(ExprPtr expr);
  ExprPtr tuple_items(bool conditional, bool parenthesized);
  ExprPtr single_target();
  void arguments(Expr& expr, std::vector<ExprPtr>& parts);
  bool ends_tuple() const;
  bool starts_test_argument() const;

  const std::vector<Token>& tokens_;
  size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace tandem::jinja
