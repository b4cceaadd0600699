#include "text/jinja/functions.h"

#include <array>
#include <ctime>

#include "text/jinja/operations.h"
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
  const std::string_view made(text.data(), n);
  require(find_invalid_utf8(made) == made.npos, "strftime_now: the date is not UTF-8");
  TextBuilder date(heap);
  date.add(made, !bound[0].string->given.empty());
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

}  // namespace tandem::jinja
