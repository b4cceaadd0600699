#include "io/jinja/value.h"

#include <algorithm>

#include "io/utf8.h"

namespace tandem::jinja {

Value none() { return {.kind = Kind::kNone, .string = nullptr}; }
Value boolean(bool value) { return {.kind = Kind::kBool, .boolean = value}; }
Value integer(int64_t value) { return {.kind = Kind::kInt, .integer = value}; }
Value real(double value) { return {.kind = Kind::kFloat, .real = value}; }
Value string_of(const String& text) { return {.kind = Kind::kString, .string = &text}; }

String make_string(std::string text) {
  const size_t n_chars = count_code_points(text);
  return {std::move(text), n_chars};
}

Items Arguments::bind(std::string_view function,
                      std::initializer_list<std::string_view> names) const {
  require(positional.size() <= names.size(), "{} takes at most {} arguments, not {}", function,
          names.size(), positional.size());
  Items bound = positional;
  bound.resize(names.size());
  for (const auto& [name, value] : named) {
    const auto found = std::find(names.begin(), names.end(), name);
    require(found != names.end(), "{} has no argument '{}'", function, name);
    const auto at = static_cast<size_t>(found - names.begin());
    require(at >= positional.size(), "{} got its argument '{}' twice", function, name);
    bound[at] = value;
  }
  return bound;
}

void Heap::spend_steps(uint64_t n) {
  steps_ += n;
  require(steps_ <= limits_.steps, "more than {} steps; is a loop endless?", limits_.steps);
}

void Heap::spend_bytes(uint64_t n) {
  require(n <= limits_.bytes - bytes_, "more than {} bytes of text and values", limits_.bytes);
  bytes_ += n;
  spend_steps(n / 64);
}

Value Heap::string(std::string text) {
  spend_bytes(sizeof(String) + text.size());
  return string_of(strings_.emplace_back(make_string(std::move(text))));
}

Items* Heap::keep(Items items) {
  spend_bytes(sizeof(Items) + items.size() * sizeof(Value));
  return &items_.emplace_back(std::move(items));
}

Entries* Heap::keep(Entries entries) {
  spend_bytes(sizeof(Entries) + entries.size() * 2 * sizeof(Value));
  return &entries_.emplace_back(std::move(entries));
}

Value Heap::function(std::string name, std::function<Value(const Arguments&)> call) {
  spend_bytes(sizeof(Function) + 64);
  Function& made = functions_.emplace_back(Function{std::move(name), std::move(call)});
  return {.kind = Kind::kFunction, .function = &made};
}

Value Heap::loop(const Loop& loop) {
  spend_bytes(sizeof(Loop));
  return {.kind = Kind::kLoop, .loop = &loops_.emplace_back(loop)};
}

Value Heap::undefined(std::string name) {
  return {.kind = Kind::kUndefined, .string = string(std::move(name)).string};
}

Heap::Nested::Nested(Heap& heap) : heap_(heap) {
  require(heap.depth_ < heap.limits_.depth, "nested more than {} levels deep", heap.limits_.depth);
  ++heap.depth_;
}

}  // namespace tandem::jinja
