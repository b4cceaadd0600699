#include "text/jinja/functions.h"

#include <array>
#include <ctime>

#include "text/jinja/operations.h"
#include "text/jinja/text_functions.h"
#include "text/utf8.h"

namespace tandem::jinja {

namespace {

constexpr uint64_t kMaxRange = 100'000;  // MAX_RANGE of Jinja's sandbox

Value range(Heap& heap, const Arguments& arguments) {
  const size_t n = arguments.positional.size();
  require(n >= 1 && n <= 3 && arguments.named.empty(), "range takes 1 to 3 integers");
  for (const Value& v : arguments.positional)
    require(v.is_integral(), "range needs integers, not {}", type_name(v));
  const auto at = [&](size_t i) { return arguments.positional[i].as_integer(); };
  const int64_t start = n > 1 ? at(0) : 0, stop = n > 1 ? at(1) : at(0), step = n > 2 ? at(2) : 1;
  require(step != 0, "range cannot step by 0");
  Items items;
  for (int64_t i = start; step > 0 ? i < stop : i > stop;) {
    require(items.size() < kMaxRange, "a range has more than {} items", kMaxRange);
    items.push_back(integer(i));
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return heap.list(std::move(items));
}

Entries entries_of(Heap& heap, const Arguments& arguments) {
  require(arguments.positional.size() <= 1, "dict and namespace take at most one argument");
  Entries entries;
  if (!arguments.positional.empty()) {
    const Value& given = arguments.positional[0];
    require(given.is(Kind::kDict), "dict and namespace need a dict, not {}", type_name(given));
    entries = *given.entries;
  }
  for (const auto& [name, value] : arguments.named)
    set_entry(heap, entries, heap.string(std::string(name)), value);
  return entries;
}

[[noreturn]] Value raise_exception(const Arguments& arguments) {
  const Items bound = arguments.bind("raise_exception", {"message"});
  fail("{}", bound[0].is(Kind::kString) ? bound[0].text() : "raise_exception");
}

Value strftime_now(Heap& heap, const Arguments& arguments) {
  const Items bound = arguments.bind("strftime_now", {"format"});
  require(bound[0].is(Kind::kString), "strftime_now needs a str");
  const std::string format(bound[0].text());
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  std::array<char, 256> text;
  const size_t n = std::strftime(text.data(), text.size(), format.c_str(), &local);
  require(n > 0 || format.empty(), "strftime_now: the date is longer than {} bytes", text.size());
  const std::string_view text_view(text.data(), n);
  require(find_invalid_utf8(text_view) == text_view.npos, "strftime_now: the date is not UTF-8");
  TextBuilder date(heap);
  date.add(text_view, !bound[0].string->given.empty());
  return date.value();
}

}  // namespace

std::vector<std::pair<std::string_view, Value>> global_functions(Heap& heap) {
  return {
      {"range",
       heap.function("range", [&heap](const Arguments& given) { return range(heap, given); })},
      {"namespace", heap.function("namespace",
                                  [&heap](const Arguments& given) {
                                    return heap.name_space(entries_of(heap, given));
                                  })},
      {"dict",
       heap.function(
           "dict", [&heap](const Arguments& given) { return heap.dict(entries_of(heap, given)); })},
      {"raise_exception", heap.function("raise_exception", raise_exception)},
      {"strftime_now",
       heap.function("strftime_now",
                     [&heap](const Arguments& given) { return strftime_now(heap, given); })},
  };
}

namespace {

struct NamedTest {
  std::string_view name;
  ValueTest test;
};

const Value& single_argument(const Arguments& arguments) {
  require(arguments.positional.size() == 1 && arguments.named.empty(),
          "this test takes no argument");
  return arguments.positional[0];
}

Items two_arguments(const Arguments& arguments) {
  require(arguments.positional.size() == 2 && arguments.named.empty(),
          "this test takes one argument");
  return arguments.positional;
}

template <Kind kind>
bool is_kind(Heap&, const Arguments& arguments) {
  return single_argument(arguments).is(kind);
}

bool is_defined(Heap&, const Arguments& arguments) {
  return !single_argument(arguments).is(Kind::kUndefined);
}

bool is_iterable(Heap&, const Arguments& arguments) {
  const Value& v = single_argument(arguments);
  return v.is(Kind::kUndefined) || v.is(Kind::kString) || v.is(Kind::kDict) || v.is_sequence();
}

bool is_number(Heap&, const Arguments& arguments) { return single_argument(arguments).is_number(); }
template <bool value>
bool is_literal(Heap&, const Arguments& arguments) {
  const Value& v = single_argument(arguments);
  return v.is(Kind::kBool) && v.boolean == value;
}

bool is_lower(Heap& heap, const Arguments& arguments) {
  const std::string text = to_text(heap, single_argument(arguments));
  return to_lower(text) == text && to_upper(text) != text;
}
bool is_upper(Heap& heap, const Arguments& arguments) {
  const std::string text = to_text(heap, single_argument(arguments));
  return to_upper(text) == text && to_lower(text) != text;
}

template <Comparison comparison>
bool compares(Heap& heap, const Arguments& arguments) {
  const Items v = two_arguments(arguments);
  return compare_values(heap, comparison, v[0], v[1]);
}

bool has_remainder(Heap& heap, const Value& value, const Value& divisor, int64_t remainder) {
  return equal(heap, arithmetic(heap, Operator::kModulo, value, divisor), integer(remainder));
}
bool is_odd(Heap& heap, const Arguments& arguments) {
  return has_remainder(heap, single_argument(arguments), integer(2), 1);
}
bool is_even(Heap& heap, const Arguments& arguments) {
  return has_remainder(heap, single_argument(arguments), integer(2), 0);
}
bool is_divisible(Heap& heap, const Arguments& arguments) {
  const Items v = two_arguments(arguments);
  return has_remainder(heap, v[0], v[1], 0);
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
    {"true", is_literal<true>},
    {"false", is_literal<false>},
    {"callable", is_kind<Kind::kFunction>},
    {"lower", is_lower},
    {"upper", is_upper},
    {"eq", compares<Comparison::kEqual>},
    {"equalto", compares<Comparison::kEqual>},
    {"==", compares<Comparison::kEqual>},
    {"ne", compares<Comparison::kNotEqual>},
    {"!=", compares<Comparison::kNotEqual>},
    {"lt", compares<Comparison::kLess>},
    {"lessthan", compares<Comparison::kLess>},
    {"<", compares<Comparison::kLess>},
    {"le", compares<Comparison::kLessEqual>},
    {"<=", compares<Comparison::kLessEqual>},
    {"gt", compares<Comparison::kGreater>},
    {"greaterthan", compares<Comparison::kGreater>},
    {">", compares<Comparison::kGreater>},
    {"ge", compares<Comparison::kGreaterEqual>},
    {">=", compares<Comparison::kGreaterEqual>},
    {"in", compares<Comparison::kIn>},
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
