// Lengths, iteration, keys, attributes, indices and slices of values.
#include <algorithm>

#include "text/jinja/characters.h"
#include "text/jinja/methods.h"
#include "text/jinja/operations.h"
#include "text/utf8.h"

namespace tandem::jinja {
namespace {

[[noreturn]] void fail_on_undefined(const Value& value, std::string_view name) {
  fail("'{}' of {}, which is undefined", name, name_of(value));
}

Value loop_attribute(Heap& heap, const Loop& loop, const String& name) {
  const size_t n = loop.items->size();
  const auto number = [](size_t value) { return integer(static_cast<int64_t>(value)); };
  const std::string& key = name.text;
  if (key == "index") return number(loop.at + 1);
  if (key == "index0") return number(loop.at);
  if (key == "revindex") return number(n - loop.at);
  if (key == "revindex0") return number(n - loop.at - 1);
  if (key == "first") return boolean(loop.at == 0);
  if (key == "last") return boolean(loop.at + 1 == n);
  if (key == "length") return number(n);
  if (key == "depth") return integer(1);
  if (key == "depth0") return integer(0);  // deeper only in recursive loops
  if (key == "previtem" && loop.at > 0) return (*loop.items)[loop.at - 1];
  if (key == "nextitem" && loop.at + 1 < n) return (*loop.items)[loop.at + 1];
  return heap.undefined("loop." + key);
}

Value character(Heap& heap, const String& text, size_t index) {
  if (!text.is_ascii()) heap.spend_steps(text.text.size() / 64);
  const size_t at = byte_of_char(text, index);
  return heap.part(text,
                   std::string_view(text.text).substr(at, decode_utf8(text.text, at).n_bytes));
}

struct Steps {
  int64_t start, stop, step;
};

// Python's slice.indices(n).
Steps slice_steps(const Value& start, const Value& stop, const Value& step, int64_t n) {
  const auto number = [](const Value& value, int64_t absent) {
    if (value.is(Kind::kNone)) return absent;
    require(value.is_integral(), "a slice needs integers, not {}", type_name(value));
    return value.as_integer();
  };
  const int64_t by = std::max(number(step, 1), -INT64_MAX);
  require(by != 0, "a slice cannot step by 0");
  const int64_t lowest = by > 0 ? 0 : -1, highest = by > 0 ? n : n - 1;
  const auto bound = [&](const Value& value, int64_t absent) {
    if (value.is(Kind::kNone)) return absent;
    const int64_t given = number(value, 0);
    return std::clamp(given < 0 ? given + n : given, lowest, highest);
  };
  return {bound(start, by > 0 ? lowest : highest), bound(stop, by > 0 ? highest : lowest), by};
}

}  // namespace

size_t length_of(const Value& value) {
  switch (value.kind) {
    case Kind::kUndefined:
      return 0;
    case Kind::kString:
      return value.string->n_chars;
    case Kind::kList:
    case Kind::kTuple:
      return value.items->size();
    case Kind::kDict:
      return value.entries->size();
    case Kind::kLoop:
      return value.loop->items->size();
    default:
      fail("{} has no length", type_name(value));
  }
}

Items iterate(Heap& heap, const Value& value) {
  require(value.is(Kind::kUndefined) || value.is(Kind::kString) || value.is_sequence() ||
              value.is(Kind::kDict),
          "{} cannot be iterated over", type_name(value));
  const size_t n = length_of(value);
  heap.spend_bytes(n * sizeof(Value));
  if (value.is_sequence()) return *value.items;
  Items items;
  items.reserve(n);
  if (value.is(Kind::kDict)) {
    for (const auto& entry : *value.entries) items.push_back(entry.first);
  } else if (value.is(Kind::kString)) {
    const std::string_view text = value.text();
    for (size_t at = 0; at < text.size();) {
      const size_t n_bytes = decode_utf8(text, at).n_bytes;
      items.push_back(heap.part(*value.string, text.substr(at, n_bytes)));
      at += n_bytes;
    }
  }
  return items;
}

Value* find_entry(Heap& heap, Entries& entries, const Value& key) {
  require(!key.is(Kind::kList) && !key.is(Kind::kDict), "{} cannot be a key", type_name(key));
  for (auto& [name, value] : entries)
    if (equal(heap, name, key)) return &value;
  return nullptr;
}

Value* find_entry(Heap& heap, Entries& entries, std::string_view key) {
  heap.spend_steps(entries.size() / 8);
  for (auto& [name, value] : entries)
    if (name.is(Kind::kString) && name.text() == key) return &value;
  return nullptr;
}

void set_entry(Heap& heap, Entries& entries, const Value& key, const Value& value) {
  if (Value* found = find_entry(heap, entries, key)) {
    *found = value;
    return;
  }
  heap.spend_bytes(2 * sizeof(Value));
  entries.emplace_back(key, value);
}

Value get_attribute(Heap& heap, const Value& value, const String& name) {
  if (value.is(Kind::kUndefined)) fail_on_undefined(value, name.text);
  if (value.is(Kind::kLoop)) return loop_attribute(heap, *value.loop, name);
  if (has_method(value, name.text))
    return heap.function(name.text, [&heap, value, &name](const Arguments& arguments) {
      return call_method(heap, value, name.text, arguments);
    });
  if (value.is(Kind::kDict) || value.is(Kind::kNamespace))
    if (const Value* found = find_entry(heap, *value.entries, name.text)) return *found;
  return heap.undefined(name.text);
}

Value get_item(Heap& heap, const Value& value, const Value& key) {
  if (value.is(Kind::kUndefined))
    fail_on_undefined(value, key.is(Kind::kString) ? key.text() : "[..]");
  if (value.is(Kind::kDict) && !key.is(Kind::kList) && !key.is(Kind::kDict))
    if (const Value* found = key.is(Kind::kString) ? find_entry(heap, *value.entries, key.text())
                                                   : find_entry(heap, *value.entries, key))
      return *found;
  if ((value.is(Kind::kString) || value.is_sequence()) && key.is_integral()) {
    const auto n = static_cast<int64_t>(length_of(value));
    const int64_t at = key.as_integer() < 0 ? key.as_integer() + n : key.as_integer();
    if (at < 0 || at >= n) return heap.undefined(fmt::format("item {}", key.as_integer()));
    const auto index = static_cast<size_t>(at);
    return value.is_sequence() ? (*value.items)[index] : character(heap, *value.string, index);
  }
  if (!key.is(Kind::kString)) return heap.undefined("item");
  return get_attribute(heap, value, *key.string);
}

Value get_slice(Heap& heap, const Value& value, const Value& start, const Value& stop,
                const Value& step) {
  if (value.is(Kind::kUndefined)) fail_on_undefined(value, "[:]");
  if (!value.is(Kind::kString) && !value.is_sequence()) return heap.undefined("slice");
  const auto n = static_cast<int64_t>(length_of(value));
  const Steps at = slice_steps(start, stop, step, n);
  if (value.is(Kind::kString) && at.step == 1) {
    const size_t first = byte_of_char(*value.string, static_cast<size_t>(at.start));
    const size_t last =
        at.stop <= at.start ? first : byte_of_char(*value.string, static_cast<size_t>(at.stop));
    heap.spend_steps(last / 64);
    return heap.part(*value.string, value.text().substr(first, last - first));
  }
  const Items all = iterate(heap, value);
  Items items;
  for (int64_t i = at.start; at.step > 0 ? i < at.stop : i > at.stop;) {
    items.push_back(all[static_cast<size_t>(i)]);
    if (__builtin_add_overflow(i, at.step, &i)) break;
  }
  if (value.is(Kind::kList)) return heap.list(std::move(items));
  if (value.is(Kind::kTuple)) return heap.tuple(std::move(items));
  TextBuilder text(heap);
  for (const Value& item : items) text.add(*item.string);
  return text.value();
}

}  // namespace tandem::jinja
