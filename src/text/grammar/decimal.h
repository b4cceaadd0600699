// Exact decimal numbers, for the bounds and steps of a schema's numbers.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace tandem {

struct Decimal {
  bool negative = false;
  std::string whole = "0";  // without leading zeros
  std::string fraction;     // without trailing zeros

  bool is_zero() const { return whole == "0" && fraction.empty(); }
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

}  // namespace tandem
