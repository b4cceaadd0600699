#include "text/grammar/number_grammar.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "core/check.h"

namespace tandem {

namespace {

using Node = Grammar::Node;

constexpr int kMaxIntegerDigits = 20;   // the digits of 2^64
constexpr int kMaxFractionDigits = 32;  // JsonRules::kFractionDigits
constexpr int kExactDigits = 15;        // significant digits that a double preserves

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
    const auto least = static_cast<int>(m_.min.integer.size());
    const auto most = m_.has_max ? static_cast<int>(m_.max.integer.size())
                                 : std::max(JsonRules::kIntegerDigits, least);
    for (int n = least; n <= std::min(most, kMaxIntegerDigits); ++n) {
      State first = {.n_integer = n, .at = 0};
      first.tight_min = n == static_cast<int>(m_.min.integer.size());
      first.tight_max = m_.has_max && n == static_cast<int>(m_.max.integer.size());
      g_.add_epsilon(from, node_of(first));
      while (!pending_.empty()) {
        const auto [state, node] = pending_.back();
        pending_.pop_back();
        expand(state, node);
      }
    }
  }

 private:
  struct State {
    int n_integer;  // number of digits before the point
    int at;         // number of digits read
    bool tight_min = false, tight_max = false, has_fraction = false, after_point = false;
    int64_t remainder = 0;
  };

  int n_fraction(int n_integer) const {
    if (!m_.any_fraction) return m_.n_fraction;
    const size_t of_bounds = std::max(m_.min.fraction.size(), m_.max.fraction.size());
    return std::min(std::max(kExactDigits - n_integer, static_cast<int>(of_bounds)),
                    kMaxFractionDigits);
  }

  static char digit_of(const Decimal& bound, int at) {
    const auto i = static_cast<size_t>(at);
    if (i < bound.integer.size()) return bound.integer[i];
    const size_t k = i - bound.integer.size();
    return k < bound.fraction.size() ? bound.fraction[k] : '0';
  }
  // Whether all digits of the bound from index `at` on are zeros.
  static bool zeros_from(const Decimal& bound, int at) {
    const std::string digits = bound.integer + bound.fraction;
    return digits.find_first_not_of('0', std::min<size_t>(at, digits.size())) == digits.npos;
  }

  // The key omits n_integer where it does not affect what follows: away from the bounds, if the
  // number of fraction digits is fixed.
  Node node_of(State state) {
    const bool is_free = !state.tight_min && !state.tight_max;
    const int left = state.n_integer - state.at;
    const bool is_first = state.at == 0;
    const auto key = std::make_tuple(is_free && !m_.any_fraction ? -1 : state.n_integer, left,
                                     is_first, state.tight_min, state.tight_max, state.has_fraction,
                                     state.after_point, state.remainder);
    const auto [it, is_new] = nodes_.try_emplace(key, -1);
    if (is_new) {
      it->second = g_.add_node();
      pending_.emplace_back(state, it->second);
    }
    return it->second;
  }

  void expand(const State& state, Node node) {
    const int left = state.n_integer - state.at;
    if (left > 0) return read_digit(state, node);
    if (state.after_point) {
      if (left < 0 && may_end(state)) g_.add_epsilon(node, end_);
      if (-left < n_fraction(state.n_integer)) read_digit(state, node);
      return;
    }
    if (may_end(state)) g_.add_epsilon(node, end_);
    if (n_fraction(state.n_integer) == 0) return;
    State after = state;
    after.after_point = true;
    g_.add_byte(node, '.', node_of(after));
  }

  bool may_end(const State& state) const {
    if (state.tight_min && (m_.above_min || !zeros_from(m_.min, state.at))) return false;
    if (state.tight_max && m_.below_max && zeros_from(m_.max, state.at)) return false;
    if (m_.fractional && !state.has_fraction) return false;
    int64_t remainder = state.remainder;
    for (int i = state.at - state.n_integer; i < m_.n_fraction; ++i)
      remainder = remainder * 10 % m_.modulus;
    return remainder == 0;
  }

  void read_digit(const State& state, Node node) {
    const bool is_leading = state.at == 0 && state.n_integer > 1;
    const char least = state.tight_min ? digit_of(m_.min, state.at) : is_leading ? '1' : '0';
    const char most = state.tight_max ? digit_of(m_.max, state.at) : '9';
    for (char digit = least; digit <= most; ++digit) {
      State next = state;
      ++next.at;
      next.tight_min = state.tight_min && digit == least;
      next.tight_max = state.tight_max && digit == most;
      next.has_fraction =
          state.has_fraction || (m_.fractional && state.after_point && digit != '0');
      next.remainder = (state.remainder * 10 + (digit - '0')) % m_.modulus;
      g_.add_byte(node, digit, node_of(next));
    }
  }

  Grammar& g_;
  const Node end_;
  const Magnitudes& m_;
  std::map<std::tuple<int, int, bool, bool, bool, bool, bool, int64_t>, Node> nodes_;
  std::vector<std::pair<State, Node>> pending_;
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
  const auto reduce = [&](Decimal& bound, bool& is_exclusive, bool is_max) {
    const Decimal exact = shifted(bound, n_zeros);
    bound = exact;
    bound.fraction.clear();
    // A fractional bound is rounded down; the result is then excluded as a minimum and included as
    // a maximum.
    if (!exact.fraction.empty()) is_exclusive = !is_max;
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
  if (has_zero) g.add_byte(from, '0', to);
  shift(m, step.exponent);
  if (m.min.is_zero()) m.above_min = true;
  const Node zeros = g.add_node();
  DigitWriter(g, zeros, m).write(from);
  g.add_text(zeros, std::string(static_cast<size_t>(step.exponent), '0'), to);
}

}  // namespace

void add_numbers(Grammar& g, const JsonRules& json, Grammar::Rule rule, const NumberSet& set) {
  const bool has_bounds = set.min || set.max || set.fractional;
  const bool has_step = set.step && (set.step->digits != 1 || set.step->exponent != 0);
  if (!has_bounds && !has_step)
    return g.add_call(g.start(rule), set.step ? json.integer : json.number, g.end(rule));
  if (set.step) {
    require(set.step->digits <= kMaxStepDigits,
            "multiples of a step of more than {} (without trailing zeros) are not supported",
            kMaxStepDigits);
    require(std::abs(set.step->exponent) < kMaxIntegerDigits,
            "multiples of a step with more than {} zeros are not supported", kMaxIntegerDigits);
  }
  if (const auto m = magnitudes(set, false)) add_magnitudes(g, g.start(rule), g.end(rule), *m, set);
  if (const auto m = magnitudes(set, true))
    add_magnitudes(g, g.add_byte(g.start(rule), '-'), g.end(rule), *m, set);
}

namespace {

constexpr int64_t kMaxDigits = 1'000'000'000;

// The number with these digits, the last n_after of them after the decimal point.
Decimal with_point(bool negative, std::string digits, int n_after) {
  if (n_after < 0) digits.append(static_cast<size_t>(-n_after), '0');
  const auto n = static_cast<size_t>(std::max(0, n_after));
  if (digits.size() <= n) digits.insert(0, n + 1 - digits.size(), '0');
  Decimal out{negative, digits.substr(0, digits.size() - n), digits.substr(digits.size() - n)};
  out.integer.erase(0, std::min(out.integer.find_first_not_of('0'), out.integer.size() - 1));
  out.fraction.erase(out.fraction.find_last_not_of('0') + 1);
  if (out.is_zero()) out.negative = false;
  return out;
}

int sign(int order) { return order < 0 ? -1 : order > 0 ? 1 : 0; }

int compare_magnitudes(const Decimal& a, const Decimal& b) {
  if (a.integer.size() != b.integer.size()) return a.integer.size() < b.integer.size() ? -1 : 1;
  const int integer = sign(a.integer.compare(b.integer));
  return integer != 0 ? integer : sign(a.fraction.compare(b.fraction));
}

int64_t modulo(const std::string& digits, int64_t divisor) {
  int64_t rest = 0;
  for (const char c : digits) rest = (rest * 10 + (c - '0')) % divisor;
  return rest;
}

}  // namespace

Decimal decimal_of(const nlohmann::ordered_json& value) {
  std::string text = value.dump();
  const bool negative = text[0] == '-';
  if (negative) text.erase(0, 1);
  int exponent = 0;
  if (const size_t e = text.find('e'); e != text.npos) {
    exponent = std::stoi(text.substr(e + 1));
    text.erase(e);
  }
  int n_after = 0;
  if (const size_t point = text.find('.'); point != text.npos) {
    n_after = static_cast<int>(text.size() - point) - 1;
    text.erase(point, 1);
  }
  return with_point(negative, text, n_after - exponent);
}

int compare(const Decimal& a, const Decimal& b) {
  if (a.negative != b.negative) return a.negative ? -1 : 1;
  return a.negative ? compare_magnitudes(b, a) : compare_magnitudes(a, b);
}

std::optional<DecimalStep> step_of(const Decimal& value) {
  if (value.negative || value.is_zero()) return {};
  std::string digits = value.integer + value.fraction;
  digits.erase(0, digits.find_first_not_of('0'));
  auto exponent = -static_cast<int>(value.fraction.size());
  for (; digits.back() == '0'; digits.pop_back()) ++exponent;
  if (digits.size() > 9) return {};
  return DecimalStep{std::stoll(digits), exponent};
}

std::optional<DecimalStep> common_multiple(const DecimalStep& a, const DecimalStep& b) {
  const int exponent = std::min(a.exponent, b.exponent);
  const auto integer = [&](const DecimalStep& step) {
    int64_t digits = step.digits;
    for (int e = step.exponent; e > exponent && digits < kMaxDigits; --e) digits *= 10;
    return digits;
  };
  const int64_t of_a = integer(a), of_b = integer(b);
  if (of_a >= kMaxDigits || of_b >= kMaxDigits) return {};
  DecimalStep out = {of_a / std::gcd(of_a, of_b) * of_b, exponent};
  for (; out.digits % 10 == 0; out.digits /= 10) ++out.exponent;
  if (out.digits >= kMaxDigits) return {};
  return out;
}

bool is_multiple(const Decimal& value, const DecimalStep& step) {
  const Decimal scaled = shifted(value, step.exponent);
  return scaled.fraction.empty() && modulo(scaled.integer, step.digits) == 0;
}

Decimal shifted(const Decimal& value, int exponent) {
  return with_point(value.negative, value.integer + value.fraction,
                    static_cast<int>(value.fraction.size()) + exponent);
}

}  // namespace tandem
