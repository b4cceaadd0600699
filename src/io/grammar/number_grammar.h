// Numbers between bounds, digit by digit.
#pragma once
#include <cstdint>
#include <optional>

#include "io/grammar/grammar.h"

namespace tandem {

struct NumberBounds {
  std::optional<int64_t> min, max;
  bool above_min = false, below_max = false;  // the bound itself is out
};

// JSON's integers. Throws Error when there is none between the bounds.
void add_integers(Grammar& grammar, Grammar::Rule rule, const NumberBounds& bounds);
// JSON's numbers, without exponents.
void add_numbers(Grammar& grammar, Grammar::Rule rule, const NumberBounds& bounds);

}  // namespace tandem
