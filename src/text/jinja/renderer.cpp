#include "text/jinja/renderer.h"

#include <algorithm>

#include "text/jinja/functions.h"
#include "text/jinja/lexer.h"
#include "text/jinja/operations.h"

namespace tandem::jinja {

TextBuilder Renderer::run(const Block& block, const Entries& context) {
  try {
    const ScopeGuard globals(*this, nullptr);
    for (const auto& [name, function] : global_functions(heap_)) assign_name(name, function);
    const ScopeGuard variables(*this, scope_);
    for (const auto& [name, value] : context) assign_name(name.text(), value);
    const ScopeGuard own(*this, scope_);
    execute(block);
  } catch (const Error& error) {
    fail_at(line_, "{}", error.what());
  }
  return std::move(out_);
}

Renderer::Flow Renderer::execute(const Block& block) {
  for (const Stmt& stmt : block)
    if (const Flow flow = execute(stmt); flow != Flow::kNext) return flow;
  return Flow::kNext;
}

Renderer::Flow Renderer::execute(const Stmt& stmt) {
  const Heap::NestingGuard nested(heap_);
  heap_.spend_steps(1);
  line_ = stmt.line;
  switch (stmt.kind) {
    case StmtKind::kText:
      out_.add(stmt.text);
      return Flow::kNext;
    case StmtKind::kPrint:
      write_text(heap_, evaluate(*stmt.value), out_);
      return Flow::kNext;
    case StmtKind::kIf:
      return execute_if(stmt);
    case StmtKind::kFor:
      execute_for(stmt);
      return Flow::kNext;
    case StmtKind::kSet:
      assign(*stmt.target, evaluate(*stmt.value));
      return Flow::kNext;
    case StmtKind::kSetBlock:
      assign(*stmt.target, capture_set_block(stmt));
      return Flow::kNext;
    case StmtKind::kMacro:
      execute_macro(stmt);
      return Flow::kNext;
    case StmtKind::kScope: {
      const ScopeGuard inner(*this, scope_);
      return execute(stmt.blocks[0]);
    }
    case StmtKind::kBreak:
      return Flow::kBreak;
    case StmtKind::kContinue:
      break;
  }
  return Flow::kContinue;
}

Renderer::Flow Renderer::execute_if(const Stmt& stmt) {
  for (size_t i = 0; i < stmt.conditions.size(); ++i)
    if (is_true(evaluate(*stmt.conditions[i]))) return execute(stmt.blocks[i]);
  const bool has_else = stmt.blocks.size() > stmt.conditions.size();
  return has_else ? execute(stmt.blocks.back()) : Flow::kNext;
}

void Renderer::execute_for(const Stmt& stmt) {
  const Items& items = *heap_.list(loop_items(stmt)).items;  // a stored `loop` refers to them
  const Value loop = heap_.loop({.items = &items, .at = 0});
  for (size_t i = 0; i < items.size(); ++i) {
    const ScopeGuard iteration(*this, scope_);
    loop.loop->at = i;
    assign(*stmt.target, items[i]);
    assign_name("loop", loop);
    if (execute(stmt.blocks[0]) == Flow::kBreak) break;
  }
  if (items.empty() && stmt.blocks.size() > 1) {
    const ScopeGuard otherwise(*this, scope_);
    execute(stmt.blocks[1]);
  }
}

Items Renderer::loop_items(const Stmt& stmt) {
  Items items = iterate(heap_, evaluate(*stmt.value));
  if (!stmt.filter) return items;
  const ScopeGuard filtering(*this, scope_);
  std::erase_if(items, [&](const Value& item) {
    assign(*stmt.target, item);
    return !is_true(evaluate(*stmt.filter));
  });
  return items;
}

void Renderer::assign(const Expr& target, const Value& value) {
  if (target.kind == ExprKind::kName) return assign_name(target.text.text, value);
  if (target.kind == ExprKind::kAttribute) {
    const Value space = evaluate(*target.parts[0]);
    require(space.is(Kind::kNamespace), "only attributes of a namespace() can be set, not of {}",
            type_name(space));
    return set_entry(heap_, *space.entries, string_of(target.text), value);
  }
  const Items items = iterate(heap_, value);
  require(items.size() == target.parts.size(), "{} values cannot be unpacked to {} names",
          items.size(), target.parts.size());
  for (size_t i = 0; i < items.size(); ++i) assign(*target.parts[i], items[i]);
}

void Renderer::assign_name(std::string_view name, const Value& value) {
  heap_.spend_steps(scope_->names.size() / 8);
  for (auto& [known, held] : scope_->names)
    if (known == name) {
      held = value;
      return;
    }
  heap_.spend_bytes(sizeof(Value) + sizeof(std::string_view));
  scope_->names.emplace_back(name, value);
}

void Renderer::execute_macro(const Stmt& stmt) {
  const Scope* closure = scope_;
  assign_name(stmt.text, heap_.function(stmt.text, [this, &stmt, closure](const Arguments& given) {
    return call_macro(stmt, closure, given);
  }));
}

Value Renderer::call_macro(const Stmt& stmt, const Scope* closure, const Arguments& arguments) {
  const size_t n = stmt.parameters.size();
  require(arguments.positional.size() <= n, "macro {} takes at most {} arguments, not {}",
          stmt.text, n, arguments.positional.size());
  const ScopeGuard called(*this, closure);
  const size_t first_default = n - stmt.defaults.size();
  size_t n_named = 0;
  for (size_t i = 0; i < n; ++i) {
    const std::string& name = stmt.parameters[i];
    const auto named = std::find_if(arguments.named.begin(), arguments.named.end(),
                                    [&](const auto& given) { return given.first == name; });
    const bool is_named = named != arguments.named.end();
    require(!is_named || i >= arguments.positional.size(), "macro {} got the argument '{}' twice",
            stmt.text, name);
    n_named += is_named ? 1 : 0;
    if (i < arguments.positional.size())
      assign_name(name, arguments.positional[i]);
    else if (is_named)
      assign_name(name, named->second);
    else if (i >= first_default)
      assign_name(name, evaluate(*stmt.defaults[i - first_default]));
    else
      assign_name(name, heap_.undefined(name));
  }
  require(n_named == arguments.named.size(), "macro {} was called with an unknown argument name",
          stmt.text);
  const int line = line_;
  const Value text = capture(stmt.blocks[0]);
  line_ = line;
  return text;
}

Value Renderer::capture(const Block& block) {
  TextBuilder outer = std::exchange(out_, TextBuilder(heap_));
  execute(block);
  return std::exchange(out_, std::move(outer)).value();
}

Value Renderer::capture_set_block(const Stmt& stmt) {
  Value text;
  {
    const ScopeGuard inner(*this, scope_);
    text = capture(stmt.blocks[0]);
  }
  if (!stmt.value) return text;
  block_text_ = text;
  return evaluate(*stmt.value);
}

Renderer::ScopeGuard::ScopeGuard(Renderer& renderer, const Scope* parent)
    : renderer_(renderer), outer_(renderer.scope_) {
  renderer.heap_.spend_bytes(sizeof(Scope));
  renderer.scope_ = &renderer.scopes_.emplace_back(Scope{parent, {}});
}

}  // namespace tandem::jinja
