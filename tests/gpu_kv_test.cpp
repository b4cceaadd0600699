// Tokens written to an FP8 cache: each number is the nearest that its block's scale allows.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "gpu_kernels/attention/attention.h"
#include "tests/gpu_memory.h"

namespace tandem::gpu {
namespace {

struct Token {
  fp8_e4m3 latent[kMaxKvRank];
  float scale[kMaxKvRank / 128];
  bf16 key[kMaxCacheDim - kMaxKvRank];
};
static_assert(sizeof(Token) == kFp8TokenBytes);

// A cache of n_rows rows with tokens written to `rows`.
std::vector<Token> cache_with(const std::vector<float>& kv, const std::vector<int32_t>& rows,
                              int rank, int rope_dim, int n_rows) {
  Stream stream;
  const Buffer x = on_gpu(stream, kv), at = on_gpu(stream, rows),
               cache = nans_on_gpu<Token>(n_rows);
  append_fp8(stream, {.kv = x.as<float>(),
                      .kv_stride = rank + rope_dim,
                      .rows_of_cache = at.as<int32_t>(),
                      .cache = cache.as<Token>(),
                      .tokens = static_cast<int>(rows.size()),
                      .kv_rank = rank,
                      .rope_dim = rope_dim});
  return from_gpu<Token>(stream, cache);
}

// The code nearest to v; of two equally near codes the even one.
fp8_e4m3 nearest(float v) {
  fp8_e4m3 best = {0};
  for (int code = 0; code < 255; ++code) {
    const fp8_e4m3 c = {static_cast<uint8_t>(code)};
    if (std::isnan(widen(c)) || std::signbit(widen(c)) != std::signbit(v)) continue;
    const float off = std::abs(widen(c) - v), least = std::abs(widen(best) - v);
    if (off < least || (off == least && code % 2 == 0)) best = c;
    if (std::signbit(widen(best)) != std::signbit(v)) best = c;
  }
  return best;
}

TEST(Fp8Cache, NumbersAreTheNearest) {
  std::mt19937 rng(1);
  for (const auto& [rank, rope_dim] : {std::pair{512, 64}, {130, 16}, {8, 64}, {384, 2}}) {
    const int dim = rank + rope_dim;
    const std::vector<int32_t> rows = {3, 0, 5};
    std::vector<float> kv(rows.size() * dim);
    std::normal_distribution<float> normal(0, 3);
    for (float& v : kv) v = std::ldexp(normal(rng), -static_cast<int>(rng() % 12));
    std::fill_n(kv.begin() + dim, std::min(rank, 128), 0.0f);  // a block of zeros
    const auto cache = cache_with(kv, rows, rank, rope_dim, 7);
    for (size_t t = 0; t < rows.size(); ++t) {
      const float* x = &kv[t * dim];
      const Token& token = cache[rows[t]];
      for (int first = 0; first < kMaxKvRank; first += 128) {
        float largest = 0;
        for (int i = first; i < std::min(first + 128, rank); ++i)
          largest = std::max(largest, std::abs(x[i]));
        const float scale = token.scale[first / 128];
        EXPECT_EQ(scale, largest > 0 ? largest / 448 : 1);
        for (int i = first; i < first + 128; ++i)
          ASSERT_EQ(token.latent[i].bits, i < rank ? nearest(x[i] / scale).bits : 0)
              << rank << ", token " << t << ", column " << i << ": " << x[i] / scale;
      }
      for (int i = 0; i < 64; ++i)
        ASSERT_EQ(token.key[i].bits, narrow(i < rope_dim ? x[rank + i] : 0).bits);
    }
    for (const int row : {1, 2, 4, 6})
      for (size_t i = 0; i < sizeof(Token); ++i)
        ASSERT_EQ(reinterpret_cast<const uint8_t*>(&cache[row])[i], 0xff) << row;
  }
}

// With a scale of 1, a number halfway between two codes is rounded to the even one.
TEST(Fp8Cache, TiesGoToEven) {
  std::vector<float> kv(576, 0);
  const float ties[] = {448, 17, 19, -17, -19, 0x1.1p-3f, 0x1.3p-3f, 0x1p-10f, 0x3p-10f};
  const float want[] = {448, 16, 20, -16, -20, 0x1p-3f, 0x1.4p-3f, 0, 0x2p-9f};
  std::copy(std::begin(ties), std::end(ties), kv.begin());
  const auto cache = cache_with(kv, {0}, 512, 64, 1);
  for (size_t i = 0; i < std::size(want); ++i) EXPECT_EQ(widen(cache[0].latent[i]), want[i]) << i;
}

TEST(Fp8Cache, WhatIsNotFiniteStaysSo) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    std::vector<float> kv(576, 1);
    kv[200] = bad;
    const auto cache = cache_with(kv, {0}, 512, 64, 1);
    for (int i = 0; i < 512; ++i) {
      const float v = widen(cache[0].latent[i]) * cache[0].scale[i / 128];
      EXPECT_EQ(std::isfinite(v), i / 128 != 1) << i;
    }
  }
}

}  // namespace
}  // namespace tandem::gpu
