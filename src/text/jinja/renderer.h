// Renders a parsed template.
#pragma once
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja/syntax.h"
#include "text/jinja/value.h"

namespace tandem::jinja {

class Renderer {
 public:
  explicit Renderer(Heap& heap) : heap_(heap), out_(heap) {}

  // Throws Error "chat template line N: ..".
  TextBuilder run(const Block& block, const Entries& context);

 private:
  enum class Flow { kNext, kBreak, kContinue };

  struct Scope {
    const Scope* parent;
    std::vector<std::pair<std::string_view, Value>> names;  // views into the parsed template
  };

  // Adds a scope that is current during the lifetime of this object. Scopes are kept until the end
  // of the rendering, since macros refer to them.
  class ScopeGuard {
   public:
    ScopeGuard(Renderer& renderer, const Scope* parent);
    ~ScopeGuard() { renderer_.scope_ = outer_; }
    ScopeGuard(const ScopeGuard&) = delete;
    ScopeGuard& operator=(const ScopeGuard&) = delete;

   private:
    Renderer& renderer_;
    Scope* outer_;
  };

  Flow execute(const Block& block);
  Flow execute(const Stmt& stmt);
  Flow execute_if(const Stmt& stmt);
  void execute_for(const Stmt& stmt);
  void execute_macro(const Stmt& stmt);
  void assign(const Expr& target, const Value& value);
  void assign_name(std::string_view name, const Value& value);
  Items loop_items(const Stmt& stmt);
  Value call_macro(const Stmt& stmt, const Scope* closure, const Arguments& arguments);
  Value capture(const Block& block);
  Value capture_set_block(const Stmt& stmt);

  Value evaluate(const Expr& expr);
  Value evaluate_kind(const Expr& expr);
  Value evaluate_name(const Expr& expr);
  Value evaluate_dict(const Expr& expr);
  Value evaluate_slice(const Expr& expr);
  Value evaluate_call(const Expr& expr);
  Value evaluate_filter(const Expr& expr);
  Value evaluate_test(const Expr& expr);
  Value evaluate_concat(const Expr& expr);
  Value evaluate_compare(const Expr& expr);
  Value evaluate_conditional(const Expr& expr);
  Items evaluate_parts(const Expr& expr);
  void add_arguments(const Expr& expr, Arguments& arguments);  // from parts[1] on

  Heap& heap_;
  std::deque<Scope> scopes_;
  Scope* scope_ = nullptr;
  TextBuilder out_;
  Value block_text_;  // the text that the filters of a set block are applied to
  int line_ = 1;      // line of the syntax being evaluated, for messages
};

}  // namespace tandem::jinja
