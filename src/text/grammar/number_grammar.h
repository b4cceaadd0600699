// Grammars of numbers between bounds and with a step, digit by digit.
#pragma once
#include <optional>

#include "text/grammar/decimal.h"
#include "text/grammar/json_rules.h"

namespace tandem {

struct NumberSet {
  std::optional<Decimal> min, max;
  bool above_min = false, below_max = false;  // the bound itself is excluded
  std::optional<DecimalStep> step;            // numbers are multiples of it; 1: integers
  bool fractional = false;                    // integers are excluded
};

// Largest supported DecimalStep::digits.
inline constexpr int kMostStepDigits = 1'000;

// Adds to `rule` the numbers of the set as JSON, without exponents unless the set has all numbers:
// integers of at most 20 digits, other numbers with so few digits that the nearest double stays
// within the bounds. Throws Error for a step whose digits exceed kMostStepDigits or whose exponent
// is too large.
void add_numbers(Grammar& grammar, const JsonRules& json, Grammar::Rule rule, const NumberSet& set);

}  // namespace tandem
