#include "text/jinja/value_tests.h"

#include "text/jinja/characters.h"
#include "text/jinja/operations.h"

namespace tandem::jinja {
namespace {

struct NamedTest {
  std::string_view name;
  ValueTest test;
};

const Value& tested(const Arguments& arguments) {
  require(arguments.positional.size() == 1 && arguments.named.empty(),
          "this test takes no argument");
  return arguments.positional[0];
}

Items two(const Arguments& arguments) {
  require(arguments.positional.size() == 2 && arguments.named.empty(),
          "this test takes one argument");
  return arguments.positional;
}

template <Kind kind>
bool is_kind(Heap&, const Arguments& arguments) {
  return tested(arguments).is(kind);
}

bool is_defined(Heap&, const Arguments& arguments) {
  return !tested(arguments).is(Kind::kUndefined);
}

bool is_iterable(Heap&, const Arguments& arguments) {
  const Value& v = tested(arguments);
  return v.is(Kind::kUndefined) || v.is(Kind::kString) || v.is(Kind::kDict) || v.is_sequence();
}

bool is_number(Heap&, const Arguments& arguments) { return tested(arguments).is_number(); }
bool is_true_itself(Heap&, const Arguments& arguments) {
  return tested(arguments).is(Kind::kBool) && is_true(tested(arguments));
}
bool is_false_itself(Heap&, const Arguments& arguments) {
  return tested(arguments).is(Kind::kBool) && !is_true(tested(arguments));
}

bool is_callable(Heap&, const Arguments& arguments) {
  return tested(arguments).is(Kind::kFunction);
}

bool is_lower(Heap& heap, const Arguments& arguments) {
  const std::string text = to_text(heap, tested(arguments));
  return to_lower(text) == text && to_upper(text) != text;
}
bool is_upper(Heap& heap, const Arguments& arguments) {
  const std::string text = to_text(heap, tested(arguments));
  return to_upper(text) == text && to_lower(text) != text;
}

bool is_eq(Heap& heap, const Arguments& arguments) {
  const Items v = two(arguments);
  return equal(heap, v[0], v[1]);
}
bool is_ne(Heap& heap, const Arguments& arguments) { return !is_eq(heap, arguments); }
bool is_lt(Heap& heap, const Arguments& arguments) {
  const Items v = two(arguments);
  return compare(heap, v[0], v[1]) == -1;
}
bool is_gt(Heap& heap, const Arguments& arguments) {
  const Items v = two(arguments);
  return compare(heap, v[0], v[1]) == 1;
}
bool is_le(Heap& heap, const Arguments& arguments) {
  const Items v = two(arguments);
  return compare(heap, v[0], v[1]) <= 0;
}
bool is_ge(Heap& heap, const Arguments& arguments) {
  const Items v = two(arguments);
  const int order = compare(heap, v[0], v[1]);
  return order == 0 || order == 1;
}
bool is_in(Heap& heap, const Arguments& arguments) {
  const Items v = two(arguments);
  return contains(heap, v[1], v[0]);
}

bool leaves(Heap& heap, const Value& value, const Value& divisor, int64_t remainder) {
  return equal(heap, arithmetic(heap, Operator::kModulo, value, divisor), integer(remainder));
}
bool is_odd(Heap& heap, const Arguments& arguments) {
  return leaves(heap, tested(arguments), integer(2), 1);
}
bool is_even(Heap& heap, const Arguments& arguments) {
  return leaves(heap, tested(arguments), integer(2), 0);
}
bool is_divisible(Heap& heap, const Arguments& arguments) {
  const Items v = two(arguments);
  return leaves(heap, v[0], v[1], 0);
}

constexpr NamedTest kTests[] = {
    {"defined", is_defined},
    {"undefined", is_kind<Kind::kUndefined>},
    {"none", is_kind<Kind::kNone>},
    {"string", is_kind<Kind::kString>},
    {"mapping", is_kind<Kind::kDict>},
    {"iterable", is_iterable},
    {"sequence", is_iterable},
    {"number", is_number},
    {"integer", is_kind<Kind::kInt>},
    {"float", is_kind<Kind::kFloat>},
    {"boolean", is_kind<Kind::kBool>},
    {"true", is_true_itself},
    {"false", is_false_itself},
    {"callable", is_callable},
    {"lower", is_lower},
    {"upper", is_upper},
    {"eq", is_eq},
    {"equalto", is_eq},
    {"==", is_eq},
    {"ne", is_ne},
    {"!=", is_ne},
    {"lt", is_lt},
    {"lessthan", is_lt},
    {"<", is_lt},
    {"le", is_le},
    {"<=", is_le},
    {"gt", is_gt},
    {"greaterthan", is_gt},
    {">", is_gt},
    {"ge", is_ge},
    {">=", is_ge},
    {"in", is_in},
    {"odd", is_odd},
    {"even", is_even},
    {"divisibleby", is_divisible},
};

}  // namespace

ValueTest find_value_test(std::string_view name) {
  for (const NamedTest& known : kTests)
    if (known.name == name) return known.test;
  return nullptr;
}

}  // namespace tandem::jinja
