#include "text/grammar/number_grammar.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "core/check.h"

namespace tandem {
namespace {

using Node = Grammar::Node;

constexpr int kMostWholeDigits = 20;     // the digits of 2^64
constexpr int kMostFractionDigits = 32;  // JsonRules::kFractionDigits
constexpr int kExactDigits = 15;         // significant digits that a double preserves

// The non-negative numbers from min to max that are multiples of `modulus` units in the last place
// of the fraction.
struct Magnitudes {
  Decimal min, max;
  bool has_max, above_min, below_max, fractional;
  bool any_fraction;  // the number of fraction digits is not given by a step
  int n_fraction;     // most fraction digits otherwise
  int64_t modulus;
};

// Compares digits with those of the bounds from the left: a number is tight to a bound as long as
// its digits equal the bound's.
class DigitWriter {
 public:
  DigitWriter(Grammar& grammar, Node end, const Magnitudes& m) : g_(grammar), end_(end), m_(m) {}

  void write(Node from) {
    const auto least = static_cast<int>(m_.min.whole.size());
    const auto most = m_.has_max ? static_cast<int>(m_.max.whole.size())
                                 : std::max(JsonRules::kWholeDigits, least);
    for (int n = least; n <= std::min(most, kMostWholeDigits); ++n) {
      State first = {.n_whole = n, .at = 0};
      first.tight_min = n == static_cast<int>(m_.min.whole.size());
      first.tight_max = m_.has_max && n == static_cast<int>(m_.max.whole.size());
      g_.skip(from, node_of(first));
      while (!open_.empty()) {
        const auto [state, node] = open_.back();
        open_.pop_back();
        go_on(state, node);
      }
    }
  }

 private:
  struct State {
    int n_whole;  // number of digits before the point
    int at;       // number of digits read
    bool tight_min = false, tight_max = false, not_whole = false, after_point = false;
    int64_t remainder = 0;
  };

  int n_fraction(int n_whole) const {
    if (!m_.any_fraction) return m_.n_fraction;
    const size_t of_bounds = std::max(m_.min.fraction.size(), m_.max.fraction.size());
    return std::min(std::max(kExactDigits - n_whole, static_cast<int>(of_bounds)),
                    kMostFractionDigits);
  }

  static char digit_of(const Decimal& bound, int at) {
    const auto i = static_cast<size_t>(at);
    if (i < bound.whole.size()) return bound.whole[i];
    const size_t k = i - bound.whole.size();
    return k < bound.fraction.size() ? bound.fraction[k] : '0';
  }
  // Whether all digits of the bound from index `at` on are zeros.
  static bool zeros_from(const Decimal& bound, int at) {
    const std::string digits = bound.whole + bound.fraction;
    return digits.find_first_not_of('0', std::min<size_t>(at, digits.size())) == digits.npos;
  }

  // The key omits n_whole where it does not affect what follows: away from the bounds, if the
  // number of fraction digits is fixed.
  Node node_of(State state) {
    const bool is_free = !state.tight_min && !state.tight_max;
    const int left = state.n_whole - state.at;
    const bool is_first = state.at == 0;
    const auto key = std::make_tuple(is_free && !m_.any_fraction ? -1 : state.n_whole, left,
                                     is_first, state.tight_min, state.tight_max, state.not_whole,
                                     state.after_point, state.remainder);
    const auto [it, is_new] = nodes_.try_emplace(key, -1);
    if (is_new) {
      it->second = g_.add_node();
      open_.emplace_back(state, it->second);
    }
    return it->second;
  }

  void go_on(const State& state, Node node) {
    const int left = state.n_whole - state.at;
    if (left > 0) return read_digit(state, node);
    if (state.after_point) {
      if (left < 0 && may_end(state)) g_.skip(node, end_);
      if (-left < n_fraction(state.n_whole)) read_digit(state, node);
      return;
    }
    if (may_end(state)) g_.skip(node, end_);
    if (n_fraction(state.n_whole) == 0) return;
    State after = state;
    after.after_point = true;
    g_.bytes(node, '.', '.', node_of(after));
  }

  bool may_end(const State& state) const {
    if (state.tight_min && (m_.above_min || !zeros_from(m_.min, state.at))) return false;
    if (state.tight_max && m_.below_max && zeros_from(m_.max, state.at)) return false;
    if (m_.fractional && !state.not_whole) return false;
    int64_t remainder = state.remainder;
    for (int i = state.at - state.n_whole; i < m_.n_fraction; ++i)
      remainder = remainder * 10 % m_.modulus;
    return remainder == 0;
  }

  void read_digit(const State& state, Node node) {
    const bool leads = state.at == 0 && state.n_whole > 1;
    const char least = state.tight_min ? digit_of(m_.min, state.at) : leads ? '1' : '0';
    const char most = state.tight_max ? digit_of(m_.max, state.at) : '9';
    for (char digit = least; digit <= most; ++digit) {
      State next = state;
      ++next.at;
      next.tight_min = state.tight_min && digit == least;
      next.tight_max = state.tight_max && digit == most;
      next.not_whole = state.not_whole || (m_.fractional && state.after_point && digit != '0');
      next.remainder = (state.remainder * 10 + (digit - '0')) % m_.modulus;
      const auto byte = static_cast<uint8_t>(digit);
      g_.bytes(node, byte, byte, node_of(next));
    }
  }

  Grammar& g_;
  const Node end_;
  const Magnitudes& m_;
  std::map<std::tuple<int, int, bool, bool, bool, bool, bool, int64_t>, Node> nodes_;
  std::vector<std::pair<State, Node>> open_;
};

Decimal without_sign(Decimal value) {
  value.negative = false;
  return value;
}

// The magnitudes of the set's numbers with the given sign; nullopt if there are none. Zero counts
// as positive.
std::optional<Magnitudes> magnitudes(const NumberSet& set, bool negative) {
  const auto& near = negative ? set.max : set.min;
  const auto& far = negative ? set.min : set.max;
  const bool without_near = negative ? set.below_max : set.above_min;
  const bool without_far = negative ? set.above_min : set.below_max;
  if (far && !far->is_zero() && far->negative != negative) return {};
  if (far && far->is_zero() && (negative || without_far)) return {};
  Magnitudes m = {};
  const bool from_zero = !near || near->is_zero() || near->negative != negative;
  if (!from_zero) m.min = without_sign(*near);
  if (far) m.max = without_sign(*far);
  m.has_max = far.has_value();
  const bool is_bound = near && near->is_zero() && without_near;
  m.above_min = from_zero ? negative || is_bound : without_near;
  m.below_max = without_far;
  return m;
}

// Divides the bounds by 10^n_zeros: multiples of a step with trailing zeros are multiples of the
// step without them, followed by the zeros.
void shift(Magnitudes& m, int n_zeros) {
  const auto reduce = [&](Decimal& bound, bool& is_out, bool is_max) {
    const Decimal exact = shifted(bound, n_zeros);
    bound = exact;
    bound.fraction.clear();
    // A fractional bound is rounded down; the result is then excluded as a minimum and included as
    // a maximum.
    if (!exact.fraction.empty()) is_out = !is_max;
  };
  reduce(m.min, m.above_min, false);
  if (m.has_max) reduce(m.max, m.below_max, true);
}

void add_magnitudes(Grammar& g, Node from, Node to, Magnitudes m, const NumberSet& set) {
  const DecimalStep step = set.step.value_or(DecimalStep{});
  m.fractional = set.fractional;
  m.any_fraction = !set.step;
  m.modulus = step.digits;
  m.n_fraction = std::max(0, -step.exponent);
  if (step.exponent <= 0) return DigitWriter(g, to, m).write(from);
  const bool has_zero = m.min.is_zero() && !m.above_min;
  if (has_zero) g.bytes(from, '0', '0', to);
  shift(m, step.exponent);
  if (m.min.is_zero()) m.above_min = true;
  const Node zeros = g.add_node();
  DigitWriter(g, zeros, m).write(from);
  g.text(zeros, std::string(static_cast<size_t>(step.exponent), '0'), to);
}

}  // namespace

void add_numbers(Grammar& g, const JsonRules& json, Grammar::Rule rule, const NumberSet& set) {
  const bool has_bounds = set.min || set.max || set.fractional;
  const bool of_step = set.step && (set.step->digits != 1 || set.step->exponent != 0);
  if (!has_bounds && !of_step)
    return g.call(g.start(rule), set.step ? json.integer : json.number, g.end(rule));
  if (set.step) {
    require(set.step->digits <= kMostStepDigits,
            "multiples of a step of more than {} (without zeros at its end) are not supported",
            kMostStepDigits);
    require(std::abs(set.step->exponent) < kMostWholeDigits,
            "multiples of a step with more than {} zeros are not supported", kMostWholeDigits);
  }
  if (const auto m = magnitudes(set, false)) add_magnitudes(g, g.start(rule), g.end(rule), *m, set);
  if (const auto m = magnitudes(set, true))
    add_magnitudes(g, g.byte(g.start(rule), '-'), g.end(rule), *m, set);
}

}  // namespace tandem
