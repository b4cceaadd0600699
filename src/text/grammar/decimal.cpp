#include "text/grammar/decimal.h"

#include <algorithm>
#include <numeric>

namespace tandem {
namespace {

constexpr int64_t kMostDigits = 1'000'000'000;

// The number with these digits, the last n_after of them after the decimal point.
Decimal with_point(bool negative, std::string digits, int n_after) {
  if (n_after < 0) digits.append(static_cast<size_t>(-n_after), '0');
  const auto n = static_cast<size_t>(std::max(0, n_after));
  if (digits.size() <= n) digits.insert(0, n + 1 - digits.size(), '0');
  Decimal out{negative, digits.substr(0, digits.size() - n), digits.substr(digits.size() - n)};
  out.whole.erase(0, std::min(out.whole.find_first_not_of('0'), out.whole.size() - 1));
  out.fraction.erase(out.fraction.find_last_not_of('0') + 1);
  if (out.is_zero()) out.negative = false;
  return out;
}

int sign(int order) { return order < 0 ? -1 : order > 0 ? 1 : 0; }

int compare_magnitudes(const Decimal& a, const Decimal& b) {
  if (a.whole.size() != b.whole.size()) return a.whole.size() < b.whole.size() ? -1 : 1;
  const int whole = sign(a.whole.compare(b.whole));
  return whole != 0 ? whole : sign(a.fraction.compare(b.fraction));
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
  std::string digits = value.whole + value.fraction;
  digits.erase(0, digits.find_first_not_of('0'));
  auto exponent = -static_cast<int>(value.fraction.size());
  for (; digits.back() == '0'; digits.pop_back()) ++exponent;
  if (digits.size() > 9) return {};
  return DecimalStep{std::stoll(digits), exponent};
}

std::optional<DecimalStep> common_multiple(const DecimalStep& a, const DecimalStep& b) {
  const int exponent = std::min(a.exponent, b.exponent);
  const auto whole = [&](const DecimalStep& step) {
    int64_t digits = step.digits;
    for (int e = step.exponent; e > exponent && digits < kMostDigits; --e) digits *= 10;
    return digits;
  };
  const int64_t of_a = whole(a), of_b = whole(b);
  if (of_a >= kMostDigits || of_b >= kMostDigits) return {};
  DecimalStep out = {of_a / std::gcd(of_a, of_b) * of_b, exponent};
  for (; out.digits % 10 == 0; out.digits /= 10) ++out.exponent;
  if (out.digits >= kMostDigits) return {};
  return out;
}

bool is_multiple(const Decimal& value, const DecimalStep& step) {
  const Decimal scaled = shifted(value, step.exponent);
  return scaled.fraction.empty() && modulo(scaled.whole, step.digits) == 0;
}

Decimal shifted(const Decimal& value, int exponent) {
  return with_point(value.negative, value.whole + value.fraction,
                    static_cast<int>(value.fraction.size()) + exponent);
}

}  // namespace tandem
