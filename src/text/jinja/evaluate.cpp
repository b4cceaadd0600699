// Evaluation of expressions.
#include "text/jinja/functions.h"
#include "text/jinja/operations.h"
#include "text/jinja/renderer.h"

namespace tandem::jinja {
Value Renderer::evaluate(const Expr& expr) {
  const Heap::NestingGuard nested(heap_);
  heap_.spend_steps(1);
  line_ = expr.line;
  return evaluate_kind(expr);
}

Value Renderer::evaluate_kind(const Expr& expr) {
  switch (expr.kind) {
    case ExprKind::kConstant:
      return expr.constant;
    case ExprKind::kString:
      return string_of(expr.text);
    case ExprKind::kName:
      return evaluate_name(expr);
    case ExprKind::kList:
      return heap_.list(evaluate_parts(expr));
    case ExprKind::kTuple:
      return heap_.tuple(evaluate_parts(expr));
    case ExprKind::kDict:
      return evaluate_dict(expr);
    case ExprKind::kAttribute:
      return get_attribute(heap_, evaluate(*expr.parts[0]), expr.text);
    case ExprKind::kSubscript: {
      const Value object = evaluate(*expr.parts[0]);
      return get_item(heap_, object, evaluate(*expr.parts[1]));
    }
    case ExprKind::kSlice:
      return evaluate_slice(expr);
    case ExprKind::kCall:
      return evaluate_call(expr);
    case ExprKind::kFilter:
      return evaluate_filter(expr);
    case ExprKind::kTest:
      return evaluate_test(expr);
    case ExprKind::kNot:
      return boolean(!is_true(evaluate(*expr.parts[0])));
    case ExprKind::kNegative:
      return negate(evaluate(*expr.parts[0]));
    case ExprKind::kPositive:
      return arithmetic(heap_, Operator::kAdd, evaluate(*expr.parts[0]), integer(0));
    case ExprKind::kArithmetic: {
      const Value left = evaluate(*expr.parts[0]);
      return arithmetic(heap_, expr.op, left, evaluate(*expr.parts[1]));
    }
    case ExprKind::kConcat:
      return evaluate_concat(expr);
    case ExprKind::kCompare:
      return evaluate_compare(expr);
    case ExprKind::kAnd: {
      const Value left = evaluate(*expr.parts[0]);
      return is_true(left) ? evaluate(*expr.parts[1]) : left;
    }
    case ExprKind::kOr: {
      const Value left = evaluate(*expr.parts[0]);
      return is_true(left) ? left : evaluate(*expr.parts[1]);
    }
    case ExprKind::kConditional:
      break;
  }
  return evaluate_conditional(expr);
}

Value Renderer::evaluate_name(const Expr& expr) {
  for (const Scope* scope = scope_; scope; scope = scope->parent) {
    heap_.spend_steps(scope->names.size() / 8);
    for (const auto& [name, value] : scope->names)
      if (name == expr.text.text) return value;
  }
  return {.kind = Kind::kUndefined, .string = &expr.text};
}

Items Renderer::evaluate_parts(const Expr& expr) {
  Items items;
  items.reserve(expr.parts.size());
  for (const ExprPtr& part : expr.parts) items.push_back(evaluate(*part));
  return items;
}

Value Renderer::evaluate_dict(const Expr& expr) {
  const Value dict = heap_.dict({});
  for (size_t i = 0; i < expr.parts.size(); i += 2) {
    const Value key = evaluate(*expr.parts[i]);
    set_entry(heap_, *dict.entries, key, evaluate(*expr.parts[i + 1]));
  }
  return dict;
}

Value Renderer::evaluate_slice(const Expr& expr) {
  const Value object = evaluate(*expr.parts[0]);
  const auto bound = [&](size_t i) { return expr.parts[i] ? evaluate(*expr.parts[i]) : none(); };
  const Value start = bound(1), stop = bound(2);
  return get_slice(heap_, object, start, stop, bound(3));
}

void Renderer::add_arguments(const Expr& expr, Arguments& arguments) {
  const size_t first_named = expr.parts.size() - expr.names.size();
  for (size_t i = 1; i < expr.parts.size(); ++i) {
    const Value value = evaluate(*expr.parts[i]);
    if (i < first_named)
      arguments.positional.push_back(value);
    else
      arguments.named.emplace_back(expr.names[i - first_named], value);
  }
  line_ = expr.line;
}

Value Renderer::evaluate_call(const Expr& expr) {
  const Value callee = evaluate(*expr.parts[0]);
  Arguments arguments;
  add_arguments(expr, arguments);
  if (callee.is(Kind::kUndefined)) fail("{} is undefined and cannot be called", name_of(callee));
  require(callee.is(Kind::kFunction), "{} cannot be called", type_name(callee));
  return callee.function->call(arguments);
}

Value Renderer::evaluate_filter(const Expr& expr) {
  const Filter filter = find_filter(expr.text.text);
  require(filter != nullptr, "there is no filter '{}'", expr.text.text);
  Arguments arguments;
  arguments.positional.push_back(expr.parts[0] ? evaluate(*expr.parts[0]) : block_text_);
  add_arguments(expr, arguments);
  return filter(heap_, arguments);
}

Value Renderer::evaluate_test(const Expr& expr) {
  const ValueTest test = find_value_test(expr.text.text);
  require(test != nullptr, "there is no test '{}'", expr.text.text);
  Arguments arguments;
  arguments.positional.push_back(evaluate(*expr.parts[0]));
  add_arguments(expr, arguments);
  return boolean(test(heap_, arguments));
}

Value Renderer::evaluate_concat(const Expr& expr) {
  const Items parts = evaluate_parts(expr);
  TextBuilder text(heap_);
  for (const Value& part : parts) write_text(heap_, part, text);
  return text.value();
}

Value Renderer::evaluate_compare(const Expr& expr) {
  Value left = evaluate(*expr.parts[0]);
  for (size_t i = 0; i < expr.comparisons.size(); ++i) {
    const Value right = evaluate(*expr.parts[i + 1]);
    if (!compare_values(heap_, expr.comparisons[i], left, right)) return boolean(false);
    left = right;
  }
  return boolean(true);
}

Value Renderer::evaluate_conditional(const Expr& expr) {
  if (is_true(evaluate(*expr.parts[1]))) return evaluate(*expr.parts[0]);
  return expr.parts[2] ? evaluate(*expr.parts[2]) : heap_.undefined("value without else");
}

}  // namespace tandem::jinja
