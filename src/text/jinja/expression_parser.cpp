#include "text/jinja/expression_parser.h"

#include <algorithm>

namespace tandem::jinja {

ExprPtr ExpressionParser::expression() {
  const Nested nested(*this);
  ExprPtr value = or_expression();
  while (skip_name("if")) {
    ExprPtr chosen = make(ExprKind::kConditional);
    std::vector<ExprPtr> parts;
    parts.push_back(std::move(value));
    parts.push_back(or_expression());
    parts.push_back(skip_name("else") ? expression() : nullptr);
    value = with_parts(std::move(chosen), std::move(parts));
  }
  return value;
}

ExprPtr ExpressionParser::tuple_or_expression(bool conditional) {
  return tuple_items(conditional, false);
}

ExprPtr ExpressionParser::tuple_items(bool conditional, bool parenthesized) {
  const Nested nested(*this);
  ExprPtr tuple = make(ExprKind::kTuple);
  std::vector<ExprPtr> items;
  bool is_tuple = false;
  while (!ends_tuple()) {
    items.push_back(conditional ? expression() : or_expression());
    if (!skip_sign(",")) break;
    is_tuple = true;
  }
  if (!is_tuple && items.size() == 1) return std::move(items[0]);
  if (items.empty() && !parenthesized) fail_here("an expression");
  return with_parts(std::move(tuple), std::move(items));
}

bool ExpressionParser::ends_tuple() const {
  const TokenKind kind = current().kind;
  return kind == TokenKind::kPrintEnd || kind == TokenKind::kBlockEnd || kind == TokenKind::kEnd ||
         current().is_sign(")") || current().is_name("recursive");
}

ExprPtr ExpressionParser::or_expression() {
  ExprPtr left = and_expression();
  while (skip_name("or")) left = join(ExprKind::kOr, std::move(left), and_expression());
  return left;
}

ExprPtr ExpressionParser::and_expression() {
  ExprPtr left = not_expression();
  while (skip_name("and")) left = join(ExprKind::kAnd, std::move(left), not_expression());
  return left;
}

ExprPtr ExpressionParser::not_expression() {
  const Nested nested(*this);
  if (!skip_name("not")) return comparison();
  return join(ExprKind::kNot, not_expression(), nullptr);
}

ExprPtr ExpressionParser::comparison() {
  ExprPtr chain = make(ExprKind::kCompare);
  std::vector<ExprPtr> parts;
  parts.push_back(sum());
  for (Comparison next; take_comparison(next);) {
    chain->comparisons.push_back(next);
    parts.push_back(sum());
  }
  if (parts.size() == 1) return std::move(parts[0]);
  return with_parts(std::move(chain), std::move(parts));
}

bool ExpressionParser::take_comparison(Comparison& out) {
  constexpr std::string_view kSigns[] = {"==", "!=", "<", "<=", ">", ">="};
  for (size_t i = 0; i < std::size(kSigns); ++i)
    if (skip_sign(kSigns[i])) {
      out = static_cast<Comparison>(i);
      return true;
    }
  if (skip_name("in")) {
    out = Comparison::kIn;
    return true;
  }
  if (!current().is_name("not") || !tokens_[at_ + 1].is_name("in")) return false;
  at_ += 2;
  out = Comparison::kNotIn;
  return true;
}

ExprPtr ExpressionParser::sum() {
  ExprPtr left = concatenation();
  while (current().is_sign("+") || current().is_sign("-")) {
    const Operator op = current().is_sign("+") ? Operator::kAdd : Operator::kSubtract;
    advance();
    left = join(ExprKind::kArithmetic, std::move(left), concatenation());
    left->op = op;
  }
  return left;
}

ExprPtr ExpressionParser::concatenation() {
  ExprPtr concat = make(ExprKind::kConcat);
  std::vector<ExprPtr> parts;
  do parts.push_back(product());
  while (skip_sign("~"));
  if (parts.size() == 1) return std::move(parts[0]);
  return with_parts(std::move(concat), std::move(parts));
}

ExprPtr ExpressionParser::product() {
  ExprPtr left = power();
  while (true) {
    Operator op;
    if (skip_sign("*"))
      op = Operator::kMultiply;
    else if (skip_sign("/"))
      op = Operator::kDivide;
    else if (skip_sign("//"))
      op = Operator::kFloorDivide;
    else if (skip_sign("%"))
      op = Operator::kModulo;
    else
      return left;
    left = join(ExprKind::kArithmetic, std::move(left), power());
    left->op = op;
  }
}

ExprPtr ExpressionParser::power() {
  ExprPtr left = unary();
  while (skip_sign("**")) {
    left = join(ExprKind::kArithmetic, std::move(left), unary());
    left->op = Operator::kPower;
  }
  return left;
}

ExprPtr ExpressionParser::unary(bool with_filters) {
  const Nested nested(*this);
  ExprPtr expr;
  if (skip_sign("-"))
    expr = join(ExprKind::kNegative, unary(false), nullptr);
  else if (skip_sign("+"))
    expr = join(ExprKind::kPositive, unary(false), nullptr);
  else
    expr = primary();
  expr = postfix(std::move(expr));
  return with_filters ? filters(std::move(expr)) : std::move(expr);
}

ExprPtr ExpressionParser::make(ExprKind kind) const {
  auto expr = std::make_unique<Expr>();
  expr->kind = kind;
  expr->line = current().line;
  return expr;
}

ExprPtr ExpressionParser::with_parts(ExprPtr expr, std::vector<ExprPtr> parts) const {
  for (const ExprPtr& part : parts)
    if (part) expr->height = std::max(expr->height, part->height + 1);
  expr->parts = std::move(parts);
  if (expr->height > kMaxNesting)
    fail_at(expr->line, "an expression is nested more than {} levels deep", kMaxNesting);
  return expr;
}

// `b` is null for an operator with one operand.
ExprPtr ExpressionParser::join(ExprKind kind, ExprPtr a, ExprPtr b) const {
  ExprPtr expr = make(kind);
  expr->line = a->line;
  std::vector<ExprPtr> parts;
  parts.push_back(std::move(a));
  if (b) parts.push_back(std::move(b));
  return with_parts(std::move(expr), std::move(parts));
}

bool ExpressionParser::skip_name(std::string_view name) {
  if (!current().is_name(name)) return false;
  advance();
  return true;
}

bool ExpressionParser::skip_sign(std::string_view sign) {
  if (!current().is_sign(sign)) return false;
  advance();
  return true;
}

void ExpressionParser::expect_sign(std::string_view sign) {
  if (!skip_sign(sign)) fail_here(fmt::format("'{}'", sign));
}

void ExpressionParser::expect(TokenKind kind, std::string_view what) {
  if (current().kind != kind) fail_here(what);
  advance();
}

std::string ExpressionParser::take_name() {
  if (current().kind != TokenKind::kName) fail_here("a name");
  std::string name = current().text;
  advance();
  return name;
}

void ExpressionParser::fail_here(std::string_view wanted) const {
  const Token& token = current();
  switch (token.kind) {
    case TokenKind::kEnd:
    case TokenKind::kText:
      fail_at(token.line, "expected {}, found the end of the template", wanted);
    case TokenKind::kPrintEnd:
    case TokenKind::kBlockEnd:
      fail_at(token.line, "expected {}, found the end of the tag", wanted);
    default:
      fail_at(token.line, "expected {}, found '{}'", wanted, token.text);
  }
}

ExpressionParser::Nested::Nested(ExpressionParser& parser) : parser_(parser) {
  if (parser.depth_ >= kMaxNesting)
    fail_at(parser.current().line, "nested more than {} levels deep", kMaxNesting);
  ++parser.depth_;
}

}  // namespace tandem::jinja
