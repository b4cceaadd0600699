#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace tandem {
namespace {

// The (fractional) index of the pair that turns `rotations` times within the original context.
double pair_of(double rotations, const RopeConfig& rope, int rope_dim) {
  return rope_dim * std::log(rope.original_context / (2 * std::numbers::pi * rotations)) /
         (2 * std::log(rope.theta));
}

double magnitude(double factor, double mscale) {
  return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1;
}

}  // namespace

// Fast pairs keep their frequency, slow pairs have it divided by the factor, and a linear ramp
// connects the two.
std::vector<float> rope_frequencies(const RopeConfig& rope, int rope_dim) {
  double low = 0, high = 0;
  if (rope.yarn) {
    low = std::max(std::floor(pair_of(rope.beta_fast, rope, rope_dim)), 0.0);
    high = std::min(std::ceil(pair_of(rope.beta_slow, rope, rope_dim)), rope_dim - 1.0);
    if (low == high) high += 0.001;
  }
  std::vector<float> frequencies(rope_dim / 2);
  for (int i = 0; i < rope_dim / 2; ++i) {
    const double plain = std::pow(rope.theta, -2.0 * i / rope_dim);
    const double slow = rope.yarn ? std::clamp((i - low) / (high - low), 0.0, 1.0) : 0;
    frequencies[i] = static_cast<float>(plain / rope.factor * slow + plain * (1 - slow));
  }
  return frequencies;
}

float rope_amplitude(const RopeConfig& rope) {
  if (!rope.yarn) return 1;
  if (rope.mscale == 0 || rope.mscale_all_dim == 0)
    return static_cast<float>(magnitude(rope.factor, 1));
  return static_cast<float>(magnitude(rope.factor, rope.mscale) /
                            magnitude(rope.factor, rope.mscale_all_dim));
}

float softmax_scale(const ModelConfig& config) {
  const RopeConfig& rope = config.rope;
  const double m =
      rope.yarn && rope.mscale_all_dim != 0 ? magnitude(rope.factor, rope.mscale_all_dim) : 1;
  return static_cast<float>(m * m / std::sqrt(static_cast<double>(config.mla.qk_dim())));
}

}  // namespace tandem
