#include "text/jinja/operations.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "text/jinja/text_functions.h"
#include "text/utf8.h"

namespace tandem::jinja {

namespace {

constexpr int kUnordered = 2;

template <class T>
int three_way(const T& a, const T& b) {
  return a < b ? -1 : b < a ? 1 : a == b ? 0 : kUnordered;
}

int compare_numbers(const Value& a, const Value& b) {
  if (a.is_integral() && b.is_integral()) return three_way(a.as_integer(), b.as_integer());
  return three_way(a.as_real(), b.as_real());
}

bool equal_entries(Heap& heap, Entries& a, Entries& b) {
  if (a.size() != b.size()) return false;
  for (const auto& [key, value] : a) {
    const Value* other = find_entry(heap, b, key);
    if (!other || !equal(heap, value, *other)) return false;
  }
  return true;
}

[[noreturn]] void fail_undefined(const Value& value) { fail("{} is undefined", name_of(value)); }

void require_defined(const Value& a, const Value& b) {
  if (a.is(Kind::kUndefined)) fail_undefined(a);
  if (b.is(Kind::kUndefined)) fail_undefined(b);
}

Value repeat(Heap& heap, const Value& value, int64_t times) {
  times = std::max<int64_t>(times, 0);
  const auto n = static_cast<uint64_t>(times);
  if (value.is(Kind::kString)) {
    TextBuilder text(heap);
    if (value.text().empty()) return value;
    for (uint64_t i = 0; i < n; ++i) text.add(*value.string);
    return text.value();
  }
  Items items;
  for (uint64_t i = 0; i < n && !value.items->empty(); ++i) {
    heap.spend_bytes(value.items->size() * sizeof(Value));
    items.insert(items.end(), value.items->begin(), value.items->end());
  }
  return value.is(Kind::kList) ? heap.list(std::move(items)) : heap.tuple(std::move(items));
}

Value add(Heap& heap, const Value& a, const Value& b) {
  if (a.is(Kind::kString)) {
    TextBuilder text(heap);
    text.add(*a.string);
    text.add(*b.string);
    return text.value();
  }
  heap.spend_bytes((a.items->size() + b.items->size()) * sizeof(Value));
  Items items = *a.items;
  items.insert(items.end(), b.items->begin(), b.items->end());
  return a.is(Kind::kList) ? heap.list(std::move(items)) : heap.tuple(std::move(items));
}

void require_no_overflow(bool overflows) { require(!overflows, "an integer exceeds 64 bits"); }

int64_t integer_power(int64_t base, int64_t exponent) {
  int64_t result = 1;
  while (exponent > 0) {
    if (exponent & 1) require_no_overflow(__builtin_mul_overflow(result, base, &result));
    exponent >>= 1;
    if (exponent == 0) break;
    require_no_overflow(__builtin_mul_overflow(base, base, &base));
  }
  return result;
}

Value integer_arithmetic(Operator op, int64_t a, int64_t b) {
  int64_t result = 0;
  switch (op) {
    case Operator::kAdd:
      require_no_overflow(__builtin_add_overflow(a, b, &result));
      return integer(result);
    case Operator::kSubtract:
      require_no_overflow(__builtin_sub_overflow(a, b, &result));
      return integer(result);
    case Operator::kMultiply:
      require_no_overflow(__builtin_mul_overflow(a, b, &result));
      return integer(result);
    case Operator::kDivide:
      require(b != 0, "division by zero");
      return real(static_cast<double>(a) / static_cast<double>(b));
    case Operator::kPower:
      if (b >= 0) return integer(integer_power(a, b));
      require(a != 0, "0 cannot be raised to a negative power");
      return real(std::pow(static_cast<double>(a), static_cast<double>(b)));
    case Operator::kFloorDivide:
    case Operator::kModulo:
      break;
  }
  require(b != 0, "division by zero");
  if (b == -1) return op == Operator::kModulo ? integer(0) : negate(integer(a));
  const int64_t remainder = a % b;
  const bool towards_floor = remainder != 0 && (remainder < 0) != (b < 0);
  if (op == Operator::kModulo) return integer(towards_floor ? remainder + b : remainder);
  return integer(a / b - towards_floor);
}

Value real_arithmetic(Operator op, double a, double b) {
  switch (op) {
    case Operator::kAdd:
      return real(a + b);
    case Operator::kSubtract:
      return real(a - b);
    case Operator::kMultiply:
      return real(a * b);
    case Operator::kDivide:
      require(b != 0, "division by zero");
      return real(a / b);
    case Operator::kPower: {
      const double power = std::pow(a, b);
      require(std::isfinite(power) || !std::isfinite(a) || !std::isfinite(b),
              "{} ** {} is out of range", a, b);
      return real(power);
    }
    case Operator::kFloorDivide:
    case Operator::kModulo:
      break;
  }
  require(b != 0, "division by zero");
  double remainder = std::fmod(a, b);
  if (remainder != 0 && (remainder < 0) != (b < 0)) remainder += b;
  if (op == Operator::kModulo) return real(remainder == 0 ? std::copysign(0.0, b) : remainder);
  return real(std::round((a - remainder) / b));
}

}  // namespace

std::string_view type_name(const Value& value) {
  constexpr std::string_view kNames[] = {"undefined", "None",      "bool", "int",
                                         "float",     "str",       "list", "tuple",
                                         "dict",      "namespace", "loop", "function"};
  return kNames[static_cast<size_t>(value.kind)];
}

int64_t integer_or(const Value& value, int64_t default_value, std::string_view name) {
  if (value.is(Kind::kUndefined) || value.is(Kind::kNone)) return default_value;
  require(value.is_integral(), "{} needs an int, not {}", name, type_name(value));
  return value.as_integer();
}

std::string name_of(const Value& undefined) {
  return undefined.string ? fmt::format("'{}'", undefined.text()) : "a value";
}

bool is_true(const Value& value) {
  switch (value.kind) {
    case Kind::kUndefined:
    case Kind::kNone:
      return false;
    case Kind::kBool:
      return value.boolean;
    case Kind::kInt:
      return value.integer != 0;
    case Kind::kFloat:
      return value.real != 0;
    case Kind::kString:
      return !value.text().empty();
    case Kind::kList:
    case Kind::kTuple:
      return !value.items->empty();
    case Kind::kDict:
      return !value.entries->empty();
    case Kind::kNamespace:
    case Kind::kLoop:
    case Kind::kFunction:
      break;
  }
  return true;
}

bool equal(Heap& heap, const Value& a, const Value& b) {
  const Heap::NestingGuard nested(heap);
  heap.spend_steps(1);
  if (a.is_number() && b.is_number()) return compare_numbers(a, b) == 0;
  if (a.kind != b.kind) return false;
  switch (a.kind) {
    case Kind::kString:
      heap.spend_steps(std::min(a.text().size(), b.text().size()) / 64);
      return a.text() == b.text();
    case Kind::kList:
    case Kind::kTuple:
      if (a.items->size() != b.items->size()) return false;
      for (size_t i = 0; i < a.items->size(); ++i)
        if (!equal(heap, (*a.items)[i], (*b.items)[i])) return false;
      return true;
    case Kind::kDict:
      return equal_entries(heap, *a.entries, *b.entries);
    case Kind::kNamespace:
      return a.entries == b.entries;
    case Kind::kLoop:
      return a.loop == b.loop;
    case Kind::kFunction:
      return a.function == b.function;
    default:
      return true;  // undefined, None
  }
}

int compare(Heap& heap, const Value& a, const Value& b) {
  const Heap::NestingGuard nested(heap);
  heap.spend_steps(1);
  require_defined(a, b);
  if (a.is_number() && b.is_number()) return compare_numbers(a, b);
  if (a.is(Kind::kString) && b.is(Kind::kString)) {
    heap.spend_steps(std::min(a.text().size(), b.text().size()) / 64);
    return three_way(a.text().compare(b.text()), 0);  // UTF-8 bytes have the order of code points
  }
  require(a.is_sequence() && a.kind == b.kind, "{} and {} cannot be compared", type_name(a),
          type_name(b));
  const size_t n = std::min(a.items->size(), b.items->size());
  for (size_t i = 0; i < n; ++i)
    if (!equal(heap, (*a.items)[i], (*b.items)[i]))
      return compare(heap, (*a.items)[i], (*b.items)[i]);
  return three_way(a.items->size(), b.items->size());
}

bool contains(Heap& heap, const Value& container, const Value& member) {
  if (container.is(Kind::kString)) {
    require(member.is(Kind::kString), "'in' a str needs a str, not {}", type_name(member));
    heap.spend_steps(container.text().size() / 64);
    return container.text().find(member.text()) != std::string_view::npos;
  }
  if (container.is(Kind::kDict)) return find_entry(heap, *container.entries, member) != nullptr;
  for (const Value& item : iterate(heap, container))
    if (equal(heap, item, member)) return true;
  return false;
}

bool compare_values(Heap& heap, Comparison comparison, const Value& a, const Value& b) {
  switch (comparison) {
    case Comparison::kEqual:
      return equal(heap, a, b);
    case Comparison::kNotEqual:
      return !equal(heap, a, b);
    case Comparison::kLess:
      return compare(heap, a, b) == -1;
    case Comparison::kLessEqual:
      return compare(heap, a, b) <= 0;
    case Comparison::kGreater:
      return compare(heap, a, b) == 1;
    case Comparison::kGreaterEqual: {
      const int order = compare(heap, a, b);
      return order == 0 || order == 1;
    }
    case Comparison::kIn:
      return contains(heap, b, a);
    case Comparison::kNotIn:
      break;
  }
  return !contains(heap, b, a);
}

Value arithmetic(Heap& heap, Operator op, const Value& a, const Value& b) {
  require_defined(a, b);
  if (a.is_integral() && b.is_integral())
    return integer_arithmetic(op, a.as_integer(), b.as_integer());
  if (a.is_number() && b.is_number()) return real_arithmetic(op, a.as_real(), b.as_real());
  const auto is_text = [](const Value& v) { return v.is(Kind::kString) || v.is_sequence(); };
  if (op == Operator::kAdd && is_text(a) && a.kind == b.kind) return add(heap, a, b);
  if (op == Operator::kMultiply && is_text(a) && b.is_integral())
    return repeat(heap, a, b.as_integer());
  if (op == Operator::kMultiply && is_text(b) && a.is_integral())
    return repeat(heap, b, a.as_integer());
  constexpr std::string_view kSymbols[] = {"+", "-", "*", "/", "//", "%", "**"};
  fail("{} {} {} is not supported; convert one side, or use ~ to concatenate", type_name(a),
       kSymbols[static_cast<size_t>(op)], type_name(b));
}

Value negate(const Value& a) {
  if (a.is(Kind::kUndefined)) fail_undefined(a);
  require(a.is_number(), "- needs a number, not {}", type_name(a));
  if (a.is(Kind::kFloat)) return real(-a.real);
  require(a.as_integer() != std::numeric_limits<int64_t>::min(), "an integer exceeds 64 bits");
  return integer(-a.as_integer());
}

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

struct SliceBounds {
  int64_t start, stop, step;
};

// Python's slice.indices(n).
SliceBounds slice_bounds(const Value& start, const Value& stop, const Value& step, int64_t n) {
  const auto number = [](const Value& value, int64_t default_value) {
    if (value.is(Kind::kNone)) return default_value;
    require(value.is_integral(), "a slice needs integers, not {}", type_name(value));
    return value.as_integer();
  };
  const int64_t by = std::max(number(step, 1), -INT64_MAX);
  require(by != 0, "a slice cannot step by 0");
  const int64_t lowest = by > 0 ? 0 : -1, highest = by > 0 ? n : n - 1;
  const auto bound = [&](const Value& value, int64_t default_value) {
    if (value.is(Kind::kNone)) return default_value;
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
  const SliceBounds at = slice_bounds(start, stop, step, n);
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
