// Methods of str, list and dict that templates call.
#include <algorithm>
#include <span>

#include "text/jinja/operations.h"
#include "text/jinja/text_functions.h"

namespace tandem::jinja {
namespace {

using Method = Value (*)(Heap& heap, const Value& self, const Arguments& arguments);

struct NamedMethod {
  std::string_view name;
  Method call;
};

const String* text_or_null(const Value& value, std::string_view method) {
  if (value.is(Kind::kUndefined) || value.is(Kind::kNone)) return nullptr;
  require(value.is(Kind::kString), "{} needs a str, not {}", method, type_name(value));
  return value.string;
}

const String& text_argument(const Value& value, std::string_view method) {
  const String* text = text_or_null(value, method);
  require(text != nullptr, "{} needs a str", method);
  return *text;
}

template <Side side>
Value strip_method(Heap& heap, const Value& self, const Arguments& arguments) {
  const Items bound = arguments.bind("strip", {"chars"});
  const String* set = text_or_null(bound[0], "strip");
  heap.spend_steps(self.text().size() * (set ? set->text.size() : 1) / 64);
  return heap.part(*self.string, strip(self.text(), side, set));
}

template <bool from_right>
Value split_method(Heap& heap, const Value& self, const Arguments& arguments) {
  const Items bound = arguments.bind("split", {"sep", "maxsplit"});
  const String* separator = text_or_null(bound[0], "split");
  const int64_t max_splits = integer_or(bound[1], -1, "split");
  return heap.list(from_right ? split_right(heap, *self.string, separator, max_splits)
                              : split(heap, *self.string, separator, max_splits));
}

// str.startswith() and str.endswith(): whether the slice [start, end) of self `matches` a text or
// one of a tuple of texts.
template <bool (*matches)(std::string_view part, std::string_view wanted)>
Value affix_method(Heap& heap, const Value& self, const Arguments& arguments) {
  const Items bound = arguments.bind("startswith", {"text", "start", "end"});
  std::string_view part = self.text();
  Value slice = self;
  if (!bound[1].is(Kind::kUndefined) || !bound[2].is(Kind::kUndefined)) {
    const auto or_none = [](const Value& v) { return v.is(Kind::kUndefined) ? none() : v; };
    slice = get_slice(heap, self, or_none(bound[1]), or_none(bound[2]), none());
    part = slice.text();
  }
  if (!bound[0].is(Kind::kTuple))
    return boolean(matches(part, text_argument(bound[0], "startswith").text));
  return boolean(std::any_of(bound[0].items->begin(), bound[0].items->end(), [&](const Value& v) {
    return matches(part, text_argument(v, "startswith").text);
  }));
}

bool starts_with(std::string_view part, std::string_view wanted) {
  return part.starts_with(wanted);
}
bool ends_with(std::string_view part, std::string_view wanted) { return part.ends_with(wanted); }

template <bool from_right>
int64_t find_text(Heap& heap, const Value& self, const Arguments& arguments) {
  const Items bound = arguments.bind("find", {"text", "start"});
  const String& wanted = text_argument(bound[0], "find");
  const auto n = static_cast<int64_t>(self.string->n_chars);
  int64_t start = integer_or(bound[1], 0, "find");
  if (start < 0) start = std::max<int64_t>(start + n, 0);
  if (start > n) return -1;
  heap.spend_steps(self.text().size() / 64);
  const size_t from = byte_of_char(*self.string, static_cast<size_t>(start));
  const size_t at =
      from_right ? self.text().rfind(wanted.text) : self.text().find(wanted.text, from);
  if (at == std::string_view::npos || at < from) return -1;
  return static_cast<int64_t>(char_of_byte(*self.string, at));
}

template <bool from_right>
Value find_method(Heap& heap, const Value& self, const Arguments& arguments) {
  return integer(find_text<from_right>(heap, self, arguments));
}

Value index_of_text(Heap& heap, const Value& self, const Arguments& arguments) {
  const int64_t at = find_text<false>(heap, self, arguments);
  require(at >= 0, "index: the text does not occur");
  return integer(at);
}

Value replace_method(Heap& heap, const Value& self, const Arguments& arguments) {
  const Items bound = arguments.bind("replace", {"old", "new", "count"});
  return replace(heap, *self.string, text_argument(bound[0], "replace").text,
                 text_argument(bound[1], "replace"), integer_or(bound[2], -1, "replace"));
}

template <std::string (*convert)(std::string_view)>
Value map_method(Heap& heap, const Value& self, const Arguments& arguments) {
  arguments.bind("upper", {});
  return map_text(heap, *self.string, convert);
}

Value join_method(Heap& heap, const Value& self, const Arguments& arguments) {
  const Items parts = iterate(heap, arguments.bind("join", {"items"})[0]);
  TextBuilder out(heap);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (i > 0) out.add(*self.string);
    out.add(text_argument(parts[i], "join"));
  }
  return out.value();
}

Value count_text(Heap& heap, const Value& self, const Arguments& arguments) {
  const Items bound = arguments.bind("count", {"text"});
  const String& wanted = text_argument(bound[0], "count");
  heap.spend_steps(self.text().size() / 64);
  if (wanted.text.empty()) return integer(static_cast<int64_t>(self.string->n_chars) + 1);
  return integer(static_cast<int64_t>(occurrences(self.text(), wanted.text)));
}

Value split_lines(Heap& heap, const Value& self, const Arguments& arguments) {
  const Items bound = arguments.bind("splitlines", {"keepends"});
  return heap.list(lines_of(heap, *self.string, is_true(bound[0])));
}

Value is_digit(Heap&, const Value& self, const Arguments& arguments) {
  arguments.bind("isdigit", {});
  const std::string_view text = self.text();
  return boolean(!text.empty() && text.find_first_not_of("0123456789") == text.npos);
}

Value append(Heap& heap, const Value& self, const Arguments& arguments) {
  const Items bound = arguments.bind("append", {"item"});
  heap.spend_bytes(sizeof(Value));
  self.items->push_back(bound[0]);
  return none();
}

Value count_items(Heap& heap, const Value& self, const Arguments& arguments) {
  const Items bound = arguments.bind("count", {"item"});
  return integer(std::count_if(self.items->begin(), self.items->end(),
                               [&](const Value& item) { return equal(heap, item, bound[0]); }));
}

Value index_of_item(Heap& heap, const Value& self, const Arguments& arguments) {
  const Items bound = arguments.bind("index", {"item"});
  const auto found = std::find_if(self.items->begin(), self.items->end(),
                                  [&](const Value& item) { return equal(heap, item, bound[0]); });
  require(found != self.items->end(), "index: the item is not in the list");
  return integer(found - self.items->begin());
}

Value get(Heap& heap, const Value& self, const Arguments& arguments) {
  require(!arguments.positional.empty() && arguments.named.empty(),
          "get takes a key and an optional default");
  const Value* found = find_entry(heap, *self.entries, arguments.positional[0]);
  const Items bound = arguments.bind("get", {"key", "default"});
  if (found) return *found;
  return arguments.positional.size() > 1 ? bound[1] : none();
}

Value items_method(Heap& heap, const Value& self, const Arguments& arguments) {
  arguments.bind("items", {});
  return heap.list(entry_tuples(heap, self));
}

Value keys_method(Heap& heap, const Value& self, const Arguments& arguments) {
  arguments.bind("keys", {});
  return heap.list(iterate(heap, self));
}

Value values_method(Heap& heap, const Value& self, const Arguments& arguments) {
  arguments.bind("values", {});
  heap.spend_bytes(self.entries->size() * sizeof(Value));
  Items values;
  for (const auto& entry : *self.entries) values.push_back(entry.second);
  return heap.list(std::move(values));
}

constexpr NamedMethod kTextMethods[] = {
    {"split", split_method<false>},
    {"rsplit", split_method<true>},
    {"strip", strip_method<Side::kBoth>},
    {"lstrip", strip_method<Side::kLeft>},
    {"rstrip", strip_method<Side::kRight>},
    {"startswith", affix_method<starts_with>},
    {"endswith", affix_method<ends_with>},
    {"replace", replace_method},
    {"upper", map_method<to_upper>},
    {"lower", map_method<to_lower>},
    {"title", map_method<title_str>},
    {"capitalize", map_method<capitalize>},
    {"find", find_method<false>},
    {"rfind", find_method<true>},
    {"index", index_of_text},
    {"join", join_method},
    {"count", count_text},
    {"splitlines", split_lines},
    {"isdigit", is_digit},
};
constexpr NamedMethod kListMethods[] = {
    {"count", count_items},
    {"index", index_of_item},
    {"append", append},
};
constexpr NamedMethod kDictMethods[] = {
    {"get", get},
    {"items", items_method},
    {"keys", keys_method},
    {"values", values_method},
};

std::span<const NamedMethod> methods_of(const Value& self) {
  switch (self.kind) {
    case Kind::kString:
      return kTextMethods;
    case Kind::kList:
      return kListMethods;
    case Kind::kTuple:
      return std::span(kListMethods).first(2);  // the methods that do not modify
    case Kind::kDict:
      return kDictMethods;
    default:
      return {};
  }
}

const NamedMethod* find_method(const Value& self, std::string_view name) {
  for (const NamedMethod& method : methods_of(self))
    if (method.name == name) return &method;
  return nullptr;
}

}  // namespace

bool has_method(const Value& self, std::string_view name) {
  return find_method(self, name) != nullptr;
}

Value call_method(Heap& heap, const Value& self, std::string_view name,
                  const Arguments& arguments) {
  const NamedMethod* method = find_method(self, name);
  require(method != nullptr, "{} has no method '{}'", type_name(self), name);
  return method->call(heap, self, arguments);
}

}  // namespace tandem::jinja
