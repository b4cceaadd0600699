// Decimal numbers as they are written, without rounding: bounds and steps of a schema's numbers.
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

// The digits of `value`, a JSON number with an exponent of at most 400.
Decimal decimal_of(const nlohmann::ordered_json& value);

// Below 0 when a < b, above 0 when a > b.
int compare(const Decimal& a, const Decimal& b);

// digits * 10^exponent > 0, without a factor of 10 in `digits`.
struct DecimalStep {
  int64_t digits = 1;
  int exponent = 0;
};

// Empty: not above 0, or of more than nine digits.
std::optional<DecimalStep> step_of(const Decimal& value);
// The smallest that is a multiple of both; empty: of more than nine digits.
std::optional<DecimalStep> common_multiple(const DecimalStep& a, const DecimalStep& b);
bool is_multiple(const Decimal& value, const DecimalStep& step);

// value / 10^exponent.
Decimal shifted(const Decimal& value, int exponent);

}  // namespace tandem
