#include "text/jinja/value.h"

#include <algorithm>

namespace tandem::jinja {

Value none() { return {.kind = Kind::kNone, .string = nullptr}; }
Value boolean(bool value) { return {.kind = Kind::kBool, .boolean = value}; }
Value integer(int64_t value) { return {.kind = Kind::kInt, .integer = value}; }
Value real(double value) { return {.kind = Kind::kFloat, .real = value}; }
Value string_of(const String& text) { return {.kind = Kind::kString, .string = &text}; }

String make_string(std::string text) {
  const size_t n_chars = count_code_points(text);
  return {std::move(text), n_chars, {}};
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
    require(at >= positional.size(), "{} got the argument '{}' twice", function, name);
    bound[at] = value;
  }
  return bound;
}

void Heap::spend_steps(uint64_t n) {
  steps_ += n;
  require(steps_ <= limits_.steps, "more than {} steps; possibly an endless loop", limits_.steps);
}

void Heap::spend_bytes(uint64_t n) {
  require(n <= limits_.bytes - bytes_, "more than {} bytes of strings and values", limits_.bytes);
  bytes_ += n;
  spend_steps(n / 64);
}

Value Heap::string(std::string text, std::vector<ByteRange> given) {
  spend_bytes(sizeof(String) + text.size() + given.size() * sizeof(ByteRange));
  String& made = strings_.emplace_back(make_string(std::move(text)));
  made.given = std::move(given);
  return string_of(made);
}

Value Heap::part(const String& of, std::string_view part) {
  return string(std::string(part), given_in(of, part));
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

std::vector<ByteRange> given_in(const String& of, std::string_view part) {
  const auto begin = static_cast<size_t>(part.data() - of.text.data()), end = begin + part.size();
  std::vector<ByteRange> ranges;
  if (part.empty()) return ranges;
  auto range = std::lower_bound(of.given.begin(), of.given.end(), begin,
                                [](const ByteRange& r, size_t at) { return r.end <= at; });
  for (; range != of.given.end() && range->begin < end; ++range)
    ranges.push_back({std::max(range->begin, begin) - begin, std::min(range->end, end) - begin});
  return ranges;
}

void TextBuilder::add(std::string_view text, bool given) {
  heap_->spend_bytes(text.size());
  const size_t begin = text_.size();
  text_ += text;
  if (!given || text.empty()) return;
  if (!given_.empty() && given_.back().end == begin) {
    given_.back().end = text_.size();
  } else {
    heap_->spend_bytes(sizeof(ByteRange));
    given_.push_back({begin, text_.size()});
  }
}

void TextBuilder::add(const String& of, std::string_view part) {
  if (of.given.empty()) return add(part);
  size_t done = 0;
  for (const ByteRange& range : given_in(of, part)) {
    add(part.substr(done, range.begin - done));
    add(part.substr(range.begin, range.end - range.begin), true);
    done = range.end;
  }
  add(part.substr(done));
}

Heap::NestingGuard::NestingGuard(Heap& heap) : heap_(heap) {
  require(heap.depth_ < heap.limits_.depth, "nested more than {} levels deep", heap.limits_.depth);
  ++heap.depth_;
}

}  // namespace tandem::jinja
