// Numbers between bounds and of a step, digit by digit.
#pragma once
#include <optional>

#include "io/grammar/decimal.h"
#include "io/grammar/json_rules.h"

namespace tandem {

struct NumberSet {
  std::optional<Decimal> min, max;
  bool above_min = false, below_max = false;  // the bound itself is out
  std::optional<DecimalStep> step;            // 1: integers
  bool fractional = false;                    // integers are out
};

// A step's digits without their zeros at the end.
inline constexpr int kMostStepDigits = 1'000;

// JSON's numbers in the set, without exponents unless every number is: integers of at most 20
// digits, others with so few digits that the nearest double stays within the bounds. Throws Error
// for a step of which more than kMostStepDigits remainders must be told apart.
void add_numbers(Grammar& grammar, const JsonRules& json, Grammar::Rule rule, const NumberSet& set);

}  // namespace tandem
