#include "text/jinja/operations.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "text/jinja/characters.h"
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

int64_t checked(bool overflows, int64_t value) {
  require(!overflows, "an integer beyond 64 bits");
  return value;
}

int64_t integer_power(int64_t base, int64_t exponent) {
  int64_t result = 1;
  while (exponent > 0) {
    if (exponent & 1) {
      const bool overflows = __builtin_mul_overflow(result, base, &result);
      result = checked(overflows, result);
    }
    exponent >>= 1;
    if (exponent == 0) break;
    const bool overflows = __builtin_mul_overflow(base, base, &base);
    base = checked(overflows, base);
  }
  return result;
}

Value integer_arithmetic(Operator op, int64_t a, int64_t b) {
  int64_t result = 0;
  switch (op) {
    case Operator::kAdd: {
      const bool overflows = __builtin_add_overflow(a, b, &result);
      return integer(checked(overflows, result));
    }
    case Operator::kSubtract: {
      const bool overflows = __builtin_sub_overflow(a, b, &result);
      return integer(checked(overflows, result));
    }
    case Operator::kMultiply: {
      const bool overflows = __builtin_mul_overflow(a, b, &result);
      return integer(checked(overflows, result));
    }
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
              "{} ** {} is not a number that fits", a, b);
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
  const Heap::Nested nested(heap);
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
  const Heap::Nested nested(heap);
  heap.spend_steps(1);
  require_defined(a, b);
  if (a.is_number() && b.is_number()) return compare_numbers(a, b);
  if (a.is(Kind::kString) && b.is(Kind::kString)) {
    heap.spend_steps(std::min(a.text().size(), b.text().size()) / 64);
    return three_way(a.text().compare(b.text()), 0);  // UTF-8 bytes have the order of code points
  }
  require(a.is_sequence() && a.kind == b.kind, "{} and {} have no order", type_name(a),
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
  constexpr std::string_view kSigns[] = {"+", "-", "*", "/", "//", "%", "**"};
  fail("{} {} {} is not possible here; convert one side, or use ~ to join texts", type_name(a),
       kSigns[static_cast<size_t>(op)], type_name(b));
}

Value negate(const Value& a) {
  if (a.is(Kind::kUndefined)) fail_undefined(a);
  require(a.is_number(), "- needs a number, not {}", type_name(a));
  if (a.is(Kind::kFloat)) return real(-a.real);
  require(a.as_integer() != std::numeric_limits<int64_t>::min(), "an integer beyond 64 bits");
  return integer(-a.as_integer());
}

}  // namespace tandem::jinja
