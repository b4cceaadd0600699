// Parses operands of expressions: literals, names, and their postfixes .a [b] (c) |d is e.
#include <algorithm>

#include "text/jinja/expression_parser.h"

namespace tandem::jinja {

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
    case TokenKind::kSign:
      if (token.text == "(") return parenthesized();
      if (token.text == "[") return list();
      if (token.text == "{") return dict();
      break;
    default:
      break;
  }
  fail_here("an expression");
}

ExprPtr ExpressionParser::parenthesized() {
  expect_sign("(");
  ExprPtr expr = tuple_items(true, true);
  expect_sign(")");
  return expr;
}

ExprPtr ExpressionParser::list() {
  ExprPtr expr = make(ExprKind::kList);
  std::vector<ExprPtr> items;
  expect_sign("[");
  while (!current().is_sign("]")) {
    items.push_back(expression());
    if (!skip_sign(",")) break;
  }
  expect_sign("]");
  return with_parts(std::move(expr), std::move(items));
}

ExprPtr ExpressionParser::dict() {
  ExprPtr expr = make(ExprKind::kDict);
  std::vector<ExprPtr> parts;
  expect_sign("{");
  while (!current().is_sign("}")) {
    parts.push_back(expression());
    expect_sign(":");
    parts.push_back(expression());
    if (!skip_sign(",")) break;
  }
  expect_sign("}");
  return with_parts(std::move(expr), std::move(parts));
}

ExprPtr ExpressionParser::postfix(ExprPtr expr) {
  while (true) {
    if (current().is_sign("."))
      expr = attribute(std::move(expr));
    else if (current().is_sign("["))
      expr = subscript(std::move(expr));
    else if (current().is_sign("("))
      expr = call(std::move(expr));
    else
      return expr;
  }
}

ExprPtr ExpressionParser::filters(ExprPtr expr) {
  while (true) {
    if (skip_sign("|"))
      expr = filter(std::move(expr));
    else if (skip_name("is"))
      expr = test(std::move(expr));
    else if (current().is_sign("("))
      expr = call(std::move(expr));
    else
      return expr;
  }
}

ExprPtr ExpressionParser::filters_of_block() {
  ExprPtr expr = filter(nullptr);
  while (skip_sign("|")) expr = filter(std::move(expr));
  return expr;
}

ExprPtr ExpressionParser::attribute(ExprPtr expr) {
  expect_sign(".");
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
  expect_sign("[");
  ExprPtr found = make(ExprKind::kSubscript);
  std::vector<ExprPtr> parts;
  parts.push_back(std::move(expr));
  parts.push_back(current().is_sign(":") ? nullptr : expression());
  if (current().is_sign(":")) {
    found->kind = ExprKind::kSlice;
    parts.resize(4);
    for (size_t i = 2; i < 4 && skip_sign(":"); ++i)
      if (!current().is_sign("]") && !current().is_sign(":")) parts[i] = expression();
  }
  expect_sign("]");
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
  expect_sign("(");
  while (!current().is_sign(")")) {
    const bool named = current().kind == TokenKind::kName && tokens_[at_ + 1].is_sign("=");
    if (named) {
      expr.names.push_back(take_name());
      expect_sign("=");
    } else if (!expr.names.empty()) {
      fail_here("a named argument");
    }
    parts.push_back(expression());
    if (!skip_sign(",")) break;
  }
  expect_sign(")");
}

ExprPtr ExpressionParser::filter(ExprPtr expr) {
  ExprPtr filtered = make(ExprKind::kFilter);
  filtered->text = make_string(take_name());
  std::vector<ExprPtr> parts;
  parts.push_back(std::move(expr));
  if (current().is_sign("(")) arguments(*filtered, parts);
  return with_parts(std::move(filtered), std::move(parts));
}

ExprPtr ExpressionParser::test(ExprPtr expr) {
  const bool negated = skip_name("not");
  ExprPtr tested = make(ExprKind::kTest);
  tested->text = make_string(take_name());
  std::vector<ExprPtr> parts;
  parts.push_back(std::move(expr));
  if (current().is_sign("("))
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
    case TokenKind::kSign:
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
  const Nested nested(*this);
  if (skip_sign("(")) {
    ExprPtr inner = target();
    expect_sign(")");
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
  while (skip_sign(",")) {
    is_tuple = true;
    if (current().kind != TokenKind::kName && !current().is_sign("(")) break;
    if (current().is_name("in")) break;
    names.push_back(single_target());
  }
  if (!is_tuple) return std::move(names[0]);
  return with_parts(std::move(tuple), std::move(names));
}

ExprPtr ExpressionParser::set_target() {
  if (current().kind != TokenKind::kName || !tokens_[at_ + 1].is_sign(".")) return target();
  ExprPtr name = make(ExprKind::kName);
  name->text = make_string(take_name());
  return attribute(std::move(name));
}

}  // namespace tandem::jinja
