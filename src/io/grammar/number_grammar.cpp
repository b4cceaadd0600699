#include "io/grammar/number_grammar.h"

#include <algorithm>
#include <string>

#include "core/check.h"
#include "io/grammar/json_rules.h"

namespace tandem {
namespace {

using Node = Grammar::Node;
using Bound = std::optional<int64_t>;

void digit(Grammar& g, Node from, char first, char last, Node to) {
  if (first <= last) g.bytes(from, static_cast<uint8_t>(first), static_cast<uint8_t>(last), to);
}

Node any_digits(Grammar& g, Node from, size_t n) {
  for (; n > 0; --n) {
    const Node next = g.add_node();
    digit(g, from, '0', '9', next);
    from = next;
  }
  return from;
}

// Numbers of as many digits as both ends have.
void add_same_length(Grammar& g, Node from, Node to, const std::string& first,
                     const std::string& last) {
  const bool any =
      first == std::string(first.size(), '0') && last == std::string(first.size(), '9');
  if (any) return g.skip(any_digits(g, from, first.size()), to);
  const std::string rest_first = first.substr(1), rest_last = last.substr(1);
  const size_t n = rest_first.size();
  if (first[0] == last[0])
    return add_same_length(g, g.byte(from, first[0]), to, rest_first, rest_last);
  add_same_length(g, g.byte(from, first[0]), to, rest_first, std::string(n, '9'));
  add_same_length(g, g.byte(from, last[0]), to, std::string(n, '0'), rest_last);
  if (last[0] - first[0] < 2) return;
  const Node between = g.add_node();
  digit(g, from, static_cast<char>(first[0] + 1), static_cast<char>(last[0] - 1), between);
  g.skip(any_digits(g, between, n), to);
}

// Whole numbers from first >= 0 to last, if there is one, without leading zeros.
void add_whole(Grammar& g, Node from, Node to, int64_t first, Bound last) {
  if (last && *last < first) return;
  const std::string low = std::to_string(first);
  const std::string high = last ? std::to_string(*last) : std::string(JsonRules::kWholeDigits, '9');
  for (size_t n = low.size(); n <= high.size(); ++n) {
    const std::string smallest = n == 1 ? "0" : "1" + std::string(n - 1, '0');
    add_same_length(g, from, to, n == low.size() ? low : smallest,
                    n == high.size() ? high : std::string(n, '9'));
  }
}

enum class Fraction { kAny, kZero, kNotZero };

void add_fraction(Grammar& g, Node from, Node to, Fraction fraction) {
  const Node point = g.byte(from, '.');
  if (fraction != Fraction::kNotZero) g.skip(from, to);
  if (fraction == Fraction::kAny) return add_digits(g, point, to, JsonRules::kFractionDigits);
  const Node end = g.add_node();
  digit(g, point, '0', '0', fraction == Fraction::kZero ? end : point);
  if (fraction == Fraction::kNotZero) digit(g, point, '1', '9', end);
  digit(g, end, '0', fraction == Fraction::kZero ? '0' : '9', end);
  g.skip(end, to);
}

struct Magnitudes {
  int64_t min;
  Bound max;
  bool above_min, below_max;
};

void add_decimals(Grammar& g, Node from, Node to, const Magnitudes& m) {
  const auto whole = [&](int64_t first, Bound last, Fraction fraction) {
    if (last && *last < first) return;
    const Node point = g.add_node();
    add_whole(g, from, point, first, last);
    add_fraction(g, point, to, fraction);
  };
  const Bound before_max = m.max ? Bound(*m.max - 1) : Bound();
  if (m.above_min && (!m.max || *m.max > m.min)) whole(m.min, m.min, Fraction::kNotZero);
  whole(m.above_min ? m.min + 1 : m.min, before_max, Fraction::kAny);
  const bool has_max = m.max && !m.below_max && (*m.max > m.min || !m.above_min);
  if (has_max) whole(*m.max, *m.max, Fraction::kZero);
}

}  // namespace

void add_integers(Grammar& g, Grammar::Rule rule, const NumberBounds& bounds) {
  Bound min = bounds.min, max = bounds.max;
  if (min && bounds.above_min) ++*min;
  if (max && bounds.below_max) --*max;
  require(!min || !max || *min <= *max, "no integer is between its bounds");
  if (!max || *max >= 0)
    add_whole(g, g.start(rule), g.end(rule), std::max<int64_t>(0, min.value_or(0)), max);
  if (min && *min >= 0) return;
  add_whole(g, g.byte(g.start(rule), '-'), g.end(rule), max && *max < 0 ? -*max : 1,
            min ? Bound(-*min) : Bound());
}

void add_numbers(Grammar& g, Grammar::Rule rule, const NumberBounds& b) {
  const bool some =
      !b.min || !b.max || *b.min < *b.max || (*b.min == *b.max && !b.above_min && !b.below_max);
  require(some, "no number is between its bounds");
  const bool has_positive = !b.max || *b.max > 0 || (*b.max == 0 && !b.below_max);
  if (has_positive) {
    const bool from_zero = !b.min || *b.min < 0;
    add_decimals(g, g.start(rule), g.end(rule),
                 {.min = from_zero ? 0 : *b.min,
                  .max = b.max,
                  .above_min = !from_zero && b.above_min,
                  .below_max = b.below_max});
  }
  if (b.min && *b.min >= 0) return;
  const bool to_zero = !b.max || *b.max >= 0;  // "-0" is left out
  add_decimals(g, g.byte(g.start(rule), '-'), g.end(rule),
               {.min = to_zero ? 0 : -*b.max,
                .max = b.min ? Bound(-*b.min) : Bound(),
                .above_min = to_zero || b.below_max,
                .below_max = b.above_min});
}

}  // namespace tandem
