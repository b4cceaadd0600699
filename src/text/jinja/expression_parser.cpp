#include "text/jinja/expression_parser.h"

#include <algorithm>

namespace tandem::jinja {

ExprPtr ExpressionParser::expression() {
  const NestingGuard nested(*this);
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
  const NestingGuard nested(*this);
  ExprPtr tuple = make(ExprKind::kTuple);
  std::vector<ExprPtr> items;
  bool is_tuple = false;
  while (!ends_tuple()) {
    items.push_back(conditional ? expression() : or_expression());
    if (!skip_symbol(",")) break;
    is_tuple = true;
  }
  if (!is_tuple && items.size() == 1) return std::move(items[0]);
  if (items.empty() && !parenthesized) fail_expected("an expression");
  return with_parts(std::move(tuple), std::move(items));
}

bool ExpressionParser::ends_tuple() const {
  const TokenKind kind = current().kind;
  return kind == TokenKind::kPrintEnd || kind == TokenKind::kBlockEnd || kind == TokenKind::kEnd ||
         current().is_symbol(")") || current().is_name("recursive");
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
  const NestingGuard nested(*this);
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
  constexpr std::string_view kSymbols[] = {"==", "!=", "<", "<=", ">", ">="};
  for (size_t i = 0; i < std::size(kSymbols); ++i)
    if (skip_symbol(kSymbols[i])) {
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
  while (current().is_symbol("+") || current().is_symbol("-")) {
    const Operator op = current().is_symbol("+") ? Operator::kAdd : Operator::kSubtract;
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
  while (skip_symbol("~"));
  if (parts.size() == 1) return std::move(parts[0]);
  return with_parts(std::move(concat), std::move(parts));
}

ExprPtr ExpressionParser::product() {
  ExprPtr left = power();
  while (true) {
    Operator op;
    if (skip_symbol("*"))
      op = Operator::kMultiply;
    else if (skip_symbol("/"))
      op = Operator::kDivide;
    else if (skip_symbol("//"))
      op = Operator::kFloorDivide;
    else if (skip_symbol("%"))
      op = Operator::kModulo;
    else
      return left;
    left = join(ExprKind::kArithmetic, std::move(left), power());
    left->op = op;
  }
}

ExprPtr ExpressionParser::power() {
  ExprPtr left = unary();
  while (skip_symbol("**")) {
    left = join(ExprKind::kArithmetic, std::move(left), unary());
    left->op = Operator::kPower;
  }
  return left;
}

ExprPtr ExpressionParser::unary(bool with_filters) {
  const NestingGuard nested(*this);
  ExprPtr expr;
  if (skip_symbol("-"))
    expr = join(ExprKind::kNegative, unary(false), nullptr);
  else if (skip_symbol("+"))
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

bool ExpressionParser::skip_symbol(std::string_view symbol) {
  if (!current().is_symbol(symbol)) return false;
  advance();
  return true;
}

void ExpressionParser::expect_symbol(std::string_view symbol) {
  if (!skip_symbol(symbol)) fail_expected(fmt::format("'{}'", symbol));
}

void ExpressionParser::expect(TokenKind kind, std::string_view what) {
  if (current().kind != kind) fail_expected(what);
  advance();
}

std::string ExpressionParser::take_name() {
  if (current().kind != TokenKind::kName) fail_expected("a name");
  std::string name = current().text;
  advance();
  return name;
}

void ExpressionParser::fail_expected(std::string_view expected) const {
  const Token& token = current();
  switch (token.kind) {
    case TokenKind::kEnd:
    case TokenKind::kText:
      fail_at(token.line, "expected {}, found the end of the template", expected);
    case TokenKind::kPrintEnd:
    case TokenKind::kBlockEnd:
      fail_at(token.line, "expected {}, found the end of the tag", expected);
    default:
      fail_at(token.line, "expected {}, found '{}'", expected, token.text);
  }
}

ExpressionParser::NestingGuard::NestingGuard(ExpressionParser& parser) : parser_(parser) {
  if (parser.depth_ >= kMaxNesting)
    fail_at(parser.current().line, "nested more than {} levels deep", kMaxNesting);
  ++parser.depth_;
}

ExprPtr ExpressionParser::primary() {
  const Token& token = current();
  ExprPtr expr = make(ExprKind::kConstant);
  switch (token.kind) {
    case TokenKind::kInteger:
    case TokenKind::kReal:
      expr->constant = token.number;
      advance();
      return expr;
    case TokenKind::kString: {
      expr->kind = ExprKind::kString;
      std::string text;
      for (; current().kind == TokenKind::kString; advance()) text += current().text;
      expr->text = make_string(std::move(text));
      return expr;
    }
    case TokenKind::kName: {
      const std::string name = take_name();
      if (name == "true" || name == "True") {
        expr->constant = boolean(true);
      } else if (name == "false" || name == "False") {
        expr->constant = boolean(false);
      } else if (name == "none" || name == "None") {
        expr->constant = none();
      } else {
        expr->kind = ExprKind::kName;
        expr->text = make_string(name);
      }
      return expr;
    }
    case TokenKind::kSymbol:
      if (token.text == "(") return parenthesized();
      if (token.text == "[") return list();
      if (token.text == "{") return dict();
      break;
    default:
      break;
  }
  fail_expected("an expression");
}

ExprPtr ExpressionParser::parenthesized() {
  expect_symbol("(");
  ExprPtr expr = tuple_items(true, true);
  expect_symbol(")");
  return expr;
}

ExprPtr ExpressionParser::list() {
  ExprPtr expr = make(ExprKind::kList);
  std::vector<ExprPtr> items;
  expect_symbol("[");
  while (!current().is_symbol("]")) {
    items.push_back(expression());
    if (!skip_symbol(",")) break;
  }
  expect_symbol("]");
  return with_parts(std::move(expr), std::move(items));
}

ExprPtr ExpressionParser::dict() {
  ExprPtr expr = make(ExprKind::kDict);
  std::vector<ExprPtr> parts;
  expect_symbol("{");
  while (!current().is_symbol("}")) {
    parts.push_back(expression());
    expect_symbol(":");
    parts.push_back(expression());
    if (!skip_symbol(",")) break;
  }
  expect_symbol("}");
  return with_parts(std::move(expr), std::move(parts));
}

ExprPtr ExpressionParser::postfix(ExprPtr expr) {
  while (true) {
    if (current().is_symbol("."))
      expr = attribute(std::move(expr));
    else if (current().is_symbol("["))
      expr = subscript(std::move(expr));
    else if (current().is_symbol("("))
      expr = call(std::move(expr));
    else
      return expr;
  }
}

ExprPtr ExpressionParser::filters(ExprPtr expr) {
  while (true) {
    if (skip_symbol("|"))
      expr = filter(std::move(expr));
    else if (skip_name("is"))
      expr = test(std::move(expr));
    else if (current().is_symbol("("))
      expr = call(std::move(expr));
    else
      return expr;
  }
}

ExprPtr ExpressionParser::filters_of_block() {
  ExprPtr expr = filter(nullptr);
  while (skip_symbol("|")) expr = filter(std::move(expr));
  return expr;
}

ExprPtr ExpressionParser::attribute(ExprPtr expr) {
  expect_symbol(".");
  if (current().kind == TokenKind::kInteger) {
    ExprPtr index = make(ExprKind::kConstant);
    index->constant = current().number;
    advance();
    return join(ExprKind::kSubscript, std::move(expr), std::move(index));
  }
  std::string name = take_name();
  ExprPtr found = join(ExprKind::kAttribute, std::move(expr), nullptr);
  found->text = make_string(std::move(name));
  return found;
}

ExprPtr ExpressionParser::subscript(ExprPtr expr) {
  expect_symbol("[");
  ExprPtr found = make(ExprKind::kSubscript);
  std::vector<ExprPtr> parts;
  parts.push_back(std::move(expr));
  parts.push_back(current().is_symbol(":") ? nullptr : expression());
  if (current().is_symbol(":")) {
    found->kind = ExprKind::kSlice;
    parts.resize(4);
    for (size_t i = 2; i < 4 && skip_symbol(":"); ++i)
      if (!current().is_symbol("]") && !current().is_symbol(":")) parts[i] = expression();
  }
  expect_symbol("]");
  return with_parts(std::move(found), std::move(parts));
}

ExprPtr ExpressionParser::call(ExprPtr expr) {
  ExprPtr called = make(ExprKind::kCall);
  std::vector<ExprPtr> parts;
  parts.push_back(std::move(expr));
  arguments(*called, parts);
  return with_parts(std::move(called), std::move(parts));
}

// Parses "(a, b, name=c)".
void ExpressionParser::arguments(Expr& expr, std::vector<ExprPtr>& parts) {
  expect_symbol("(");
  while (!current().is_symbol(")")) {
    const bool named = current().kind == TokenKind::kName && tokens_[at_ + 1].is_symbol("=");
    if (named) {
      expr.names.push_back(take_name());
      expect_symbol("=");
    } else if (!expr.names.empty()) {
      fail_expected("a named argument");
    }
    parts.push_back(expression());
    if (!skip_symbol(",")) break;
  }
  expect_symbol(")");
}

ExprPtr ExpressionParser::filter(ExprPtr expr) {
  ExprPtr filtered = make(ExprKind::kFilter);
  filtered->text = make_string(take_name());
  std::vector<ExprPtr> parts;
  parts.push_back(std::move(expr));
  if (current().is_symbol("(")) arguments(*filtered, parts);
  return with_parts(std::move(filtered), std::move(parts));
}

ExprPtr ExpressionParser::test(ExprPtr expr) {
  const bool negated = skip_name("not");
  ExprPtr tested = make(ExprKind::kTest);
  tested->text = make_string(take_name());
  std::vector<ExprPtr> parts;
  parts.push_back(std::move(expr));
  if (current().is_symbol("("))
    arguments(*tested, parts);
  else if (starts_test_argument())
    parts.push_back(postfix(primary()));
  tested = with_parts(std::move(tested), std::move(parts));
  return negated ? join(ExprKind::kNot, std::move(tested), nullptr) : std::move(tested);
}

bool ExpressionParser::starts_test_argument() const {
  const Token& token = current();
  switch (token.kind) {
    case TokenKind::kString:
    case TokenKind::kInteger:
    case TokenKind::kReal:
      return true;
    case TokenKind::kSymbol:
      return token.text == "[" || token.text == "{";
    case TokenKind::kName: {
      constexpr std::string_view kWords[] = {"else", "or", "and", "if", "in", "not", "is"};
      return std::find(std::begin(kWords), std::end(kWords), token.text) == std::end(kWords);
    }
    default:
      return false;
  }
}

ExprPtr ExpressionParser::single_target() {
  const NestingGuard nested(*this);
  if (skip_symbol("(")) {
    ExprPtr inner = target();
    expect_symbol(")");
    return inner;
  }
  ExprPtr name = make(ExprKind::kName);
  name->text = make_string(take_name());
  constexpr std::string_view kConstants[] = {"true", "false", "none", "True", "False", "None"};
  if (std::find(std::begin(kConstants), std::end(kConstants), name->text.text) !=
      std::end(kConstants))
    fail_at(name->line, "'{}' cannot be assigned to", name->text.text);
  return name;
}

ExprPtr ExpressionParser::target() {
  ExprPtr tuple = make(ExprKind::kTuple);
  std::vector<ExprPtr> names;
  names.push_back(single_target());
  bool is_tuple = false;
  while (skip_symbol(",")) {
    is_tuple = true;
    if (current().kind != TokenKind::kName && !current().is_symbol("(")) break;
    if (current().is_name("in")) break;
    names.push_back(single_target());
  }
  if (!is_tuple) return std::move(names[0]);
  return with_parts(std::move(tuple), std::move(names));
}

ExprPtr ExpressionParser::set_target() {
  if (current().kind != TokenKind::kName || !tokens_[at_ + 1].is_symbol(".")) return target();
  ExprPtr name = make(ExprKind::kName);
  name->text = make_string(take_name());
  return attribute(std::move(name));
}

}  // namespace tandem::jinja
