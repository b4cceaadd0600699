// INT4 quantization with two levels of scales, an integer per group and a float per row.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu_kernels/kernels.h"

namespace tandem::cpu {

void quantize_two_level(const QuantizeArgs&);

namespace {

constexpr int kLanes = 8;  // partial sums that a compiler can vectorize; divides every group size

// x / scale rounded to a code, as float.
float code_of(float x, float inverse) {
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer, ties to even
  return std::min(std::max(-8.f, x * inverse), 7.f) + kRound - kRound;  // NaN becomes -8
}

// Sums of x * code and code * code.
struct Fit {
  float x_codes, codes_codes;
  // The reduction of the squared error from the sum of x * x.
  float gain(float scale) const { return scale * (2 * x_codes - scale * codes_codes); }
};

Fit fit(const float* x, int n, float scale) {
  float xc[kLanes] = {}, cc[kLanes] = {};
  const float inverse = 1 / scale;
  for (int i = 0; i < n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) {
      const float code = code_of(x[i + l], inverse);
      xc[l] += x[i + l] * code;
      cc[l] += code * code;
    }
  Fit sum = {0, 0};
  for (int l = 0; l < kLanes; ++l) {
    sum.x_codes += xc[l];
    sum.codes_codes += cc[l];
  }
  return sum;
}

struct Choice {
  int multiplier = 1;
  Fit fit = {0, 0};
};

// The multiplier with the least squared error among those that map the largest magnitude to about
// 8. A negative one maps a positive extreme to -8.
Choice choose(const float* x, int n, float largest, float row_scale) {
  const int about = static_cast<int>(largest / (8 * row_scale));
  Choice best;
  float best_gain = 0;
  for (int m = std::max(1, about - 1); m <= std::min(about + 1, kMaxMultiplier); ++m)
    for (const int signed_m : {m, -m}) {
      const float scale = row_scale * static_cast<float>(signed_m);
      const Fit f = fit(x, n, scale);
      if (f.gain(scale) <= best_gain) continue;
      best = {signed_m, f};
      best_gain = f.gain(scale);
    }
  return best;
}

float largest_of(const float* x, int64_t n) {
  float largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(x[i]));
  return largest;
}

}  // namespace

// First chooses multipliers, with a row scale that gives the largest group the largest multiplier;
// then the row scale with the least squared error for the resulting codes.
void quantize_two_level(const QuantizeArgs& a) {
  const float first_scale =
      std::max(largest_of(a.from, a.k) / (8 * kMaxMultiplier), std::numeric_limits<float>::min());
  auto* const codes = static_cast<uint8_t*>(a.codes);
  double product = 0, square = 0;
  int64_t sum = 0;
  for (int64_t g = 0; g < a.k / a.group; ++g) {
    const float* const x = a.from + g * a.group;
    const float largest = largest_of(x, a.group);
    const Choice best = largest > 0 ? choose(x, a.group, largest, first_scale) : Choice{};
    const auto multiplier = static_cast<float>(best.multiplier);
    const float inverse = largest > 0 ? 1 / (first_scale * multiplier) : 0;
    for (int64_t i = 0; i < a.group; ++i) {
      const int code = static_cast<int>(code_of(x[i], inverse));
      uint8_t& pair = codes[(g * a.group + i) / 8 * 4 + i % 4];
      pair = static_cast<uint8_t>(i % 8 < 4 ? code & 15 : pair | (code & 15) << 4);
      sum += int64_t{code} * best.multiplier;
    }
    a.scales[g] = multiplier;
    product += static_cast<double>(multiplier * best.fit.x_codes);
    square += static_cast<double>(multiplier * multiplier * best.fit.codes_codes);
  }
  *a.row_scale = square > 0 ? static_cast<float>(product / square) : 0;
  *a.sum = static_cast<float>(static_cast<double>(sum) * static_cast<double>(*a.row_scale));
  for (int64_t g = 0; g < a.k / a.group; ++g) a.scales[g] *= *a.row_scale;
}

}  // namespace tandem::cpu
