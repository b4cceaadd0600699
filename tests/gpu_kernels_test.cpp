// Each small kernel against double precision over odd shapes; outputs are NaN before.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/gpu_memory.h"

namespace tandem::gpu {
namespace {

std::mt19937 rng(7);

std::vector<float> random_floats(int64_t n, float scale) {
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> v(static_cast<size_t>(n));
  for (float& e : v) e = normal(rng);
  return v;
}

TEST(RmsNorm, EqualsDoublePrecision) {
  Stream stream;
  for (const auto& [rows, dim, stride] : {std::tuple{3, 7168, 7168}, {2, 64, 80}, {1, 5, 5}}) {
    const auto x = random_floats(int64_t{rows} * stride, 3), gain = random_floats(dim, 1);
    const Buffer dx = on_gpu(stream, x), dgain = on_gpu(stream, gain);
    const Buffer out = nans_on_gpu<float>(int64_t{rows} * dim);
    rms_norm(stream, {.x = {dx.as<float>(), stride},
                      .gain = dgain.as<float>(),
                      .out = {out.as<float>(), dim},
                      .rows = rows,
                      .dim = dim,
                      .eps = 1e-6f});
    rms_norm(stream, {.x = {dx.as<float>(), stride},
                      .gain = dgain.as<float>(),
                      .out = {dx.as<float>(), stride},
                      .rows = rows,
                      .dim = dim,
                      .eps = 1e-6f});
    const auto got = from_gpu<float>(stream, out), in_place = from_gpu<float>(stream, dx);
    for (int r = 0; r < rows; ++r) {
      double squares = 0;
      for (int i = 0; i < dim; ++i) squares += std::pow(x[r * stride + i], 2);
      const double scale = 1 / std::sqrt(squares / dim + 1e-6);
      for (int i = 0; i < stride; ++i) {
        if (i >= dim) {
          ASSERT_EQ(in_place[r * stride + i], x[r * stride + i]);
          continue;
        }
        const double want = x[r * stride + i] * scale * gain[i];
        ASSERT_NEAR(got[r * dim + i], want, 1e-5 * std::abs(want));
        ASSERT_EQ(in_place[r * stride + i], got[r * dim + i]);
      }
    }
  }
}

}  // namespace
}  // namespace tandem::gpu
