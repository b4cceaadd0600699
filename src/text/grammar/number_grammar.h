// Grammars of numbers between bounds and with a step, digit by digit.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "text/grammar/json_rules.h"

namespace tandem {

// Exact decimal numbers, for the bounds and steps of a schema's numbers.
struct Decimal {
  bool negative = false;
  std::string integer = "0";  // without leading zeros
  std::string fraction;       // without trailing zeros

  bool is_zero() const { return integer == "0" && fraction.empty(); }
};

// The digits of `value`, a JSON number whose exponent is at most 400.
Decimal decimal_of(const nlohmann::ordered_json& value);

// Negative when a < b, 0 when equal, positive when a > b.
int compare(const Decimal& a, const Decimal& b);

// A step > 0 of value digits * 10^exponent; `digits` is not divisible by 10.
struct DecimalStep {
  int64_t digits = 1;
  int exponent = 0;
};

// nullopt if `value` is not above 0 or has more than nine digits.
std::optional<DecimalStep> step_of(const Decimal& value);
// The least common multiple; nullopt if it has more than nine digits.
std::optional<DecimalStep> common_multiple(const DecimalStep& a, const DecimalStep& b);
bool is_multiple(const Decimal& value, const DecimalStep& step);

// Returns value / 10^exponent.
Decimal shifted(const Decimal& value, int exponent);

struct NumberSet {
  std::optional<Decimal> min, max;
  bool above_min = false, below_max = false;  // the bound itself is excluded
  std::optional<DecimalStep> step;            // numbers are multiples of it; 1: integers
  bool fractional = false;                    // integers are excluded
};

// Largest supported DecimalStep::digits.
inline constexpr int kMaxStepDigits = 1'000;

// Adds to `rule` the numbers of the set as JSON, without exponents unless the set has all numbers:
// integers of at most 20 digits, other numbers with so few digits that the nearest double stays
// within the bounds. Throws Error for a step whose digits exceed kMaxStepDigits or whose exponent
// is too large.
void add_numbers(Grammar& grammar, const JsonRules& json, Grammar::Rule rule, const NumberSet& set);

}  // namespace tandem
