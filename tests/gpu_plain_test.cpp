// The reference kernels against double precision: products of every weight type, experts, attention
// over shuffled pages.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "gpu_kernels/attention/plain_attention.h"
#include "gpu_kernels/products/plain_products.h"
#include "tests/gpu_memory.h"

namespace tandem::gpu {
namespace {

std::mt19937 generator(5);

std::vector<float> random_floats(int64_t n, float scale = 1) {
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> v(static_cast<size_t>(n));
  for (float& e : v) e = normal(generator);
  return v;
}

void expect_close(const std::vector<float>& got, const std::vector<double>& want, double bound) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], bound) << i;
}

// `n` matrices on the GPU, one after another, and their decoded values.
struct RandomWeights {
  Buffer data, scale;
  PlainExpertWeights view;
  std::vector<double> values;  // [n, rows, cols]
  int rows, cols;

  RandomWeights(Stream& stream, Number type, int n, int n_rows, int n_cols, int block = 0)
      : rows(n_rows), cols(n_cols) {
    const int64_t step = 16 / bytes_of(type), stride = (cols + step - 1) / step * step;
    std::vector<uint8_t> bytes(n * rows * stride * bytes_of(type));
    const int scale_rows = block ? (rows + block - 1) / block : 0;
    const int scale_cols = block ? (cols + block - 1) / block : 0;
    std::vector<float> scales = random_floats(int64_t{n} * scale_rows * scale_cols, 0.1f);
    for (int i = 0; i < n * rows; ++i)
      for (int c = 0; c < cols; ++c) {
        const float v = std::normal_distribution<float>()(generator);
        uint8_t* at = &bytes[(i * stride + c) * bytes_of(type)];
        if (type == Number::kF32) {
          std::memcpy(at, &v, 4);
          values.push_back(v);
        } else if (type == Number::kBF16) {
          const bf16 half = narrow(v);
          std::memcpy(at, &half, 2);
          values.push_back(widen(half));
        } else {
          *at = static_cast<uint8_t>(generator() % 0x7f | (generator() & 0x80));
          const int block_at = (i / rows * scale_rows + i % rows / block) * scale_cols + c / block;
          values.push_back(double{widen(fp8_e4m3{*at})} * scales[block_at]);
        }
      }
    data = on_gpu(stream, bytes);
    if (block) scale = on_gpu(stream, scales);
    view = {.first = {.data = data.as<void>(),
                      .stride = stride,
                      .type = type,
                      .rows = rows,
                      .cols = cols,
                      .scale = scale.as<float>(),
                      .scale_stride = scale_cols,
                      .block_rows = block,
                      .block_cols = block},
            .bytes_stride = rows * stride * bytes_of(type),
            .scale_stride = int64_t{scale_rows} * scale_cols};
  }
  double value(int matrix, int row, int col) const {
    return values[(int64_t{matrix} * rows + row) * cols + col];
  }
};

struct WeightCase {
  Number type;
  int block;
};
const WeightCase kWeightCases[] = {{Number::kF32, 0}, {Number::kBF16, 0}, {Number::kF8E4M3, 24}};

TEST(Plain, ProductsPerHead) {
  constexpr int kTokens = 3, kHeads = 2, kIn = 37, kOut = 29, kFirst = 2, kRowsPerHead = 41;
  Stream stream;
  for (const auto& [type, block] : kWeightCases)
    for (const bool transposed : {false, true}) {
      const int w_cols = transposed ? kOut : kIn;
      const RandomWeights w(stream, type, 1, kFirst + kHeads * kRowsPerHead, w_cols, block);
      const auto x = random_floats(kTokens * kHeads * kIn);
      const Buffer dx = on_gpu(stream, x), out = nans_on_gpu<float>(kTokens * kHeads * kOut);
      plain_product(stream, {.x = {dx.as<float>(), kIn},
                             .w = w.view.first,
                             .out = {out.as<float>(), kOut},
                             .tokens = kTokens,
                             .x_cols = kIn,
                             .out_cols = kOut,
                             .n_heads = kHeads,
                             .first_row = kFirst,
                             .rows_per_head = kRowsPerHead,
                             .transposed = transposed});
      std::vector<double> want;
      for (int r = 0; r < kTokens * kHeads; ++r)
        for (int o = 0; o < kOut; ++o) {
          const int first = kFirst + r % kHeads * kRowsPerHead;
          double sum = 0;
          for (int i = 0; i < kIn; ++i)
            sum +=
                x[r * kIn + i] * (transposed ? w.value(0, first + i, o) : w.value(0, first + o, i));
          want.push_back(sum);
        }
      expect_close(from_gpu<float>(stream, out), want, 2e-3);
    }
}

TEST(Plain, ExpertsAddTheirWeightedSum) {
  constexpr int kTokens = 3, kActive = 2, kExperts = 4, kDim = 70, kWidth = 26;
  Stream stream;
  for (const auto& [type, block] : kWeightCases) {
    const RandomWeights gate(stream, type, kExperts, kWidth, kDim, block);
    const RandomWeights up(stream, type, kExperts, kWidth, kDim, block);
    const RandomWeights down(stream, type, kExperts, kDim, kWidth, block);
    const auto x = random_floats(kTokens * kDim, 0.02f), y = random_floats(kTokens * kDim);
    const auto weights = random_floats(kTokens * kActive);
    const std::vector<int32_t> ids = {3, 0, -1, 3, 2, 1};
    const Buffer dx = on_gpu(stream, x), dy = on_gpu(stream, y), dids = on_gpu(stream, ids),
                 dweights = on_gpu(stream, weights),
                 hidden = nans_on_gpu<float>(kTokens * kActive * kWidth);
    plain_experts(stream, {.x = {dx.as<float>(), kDim},
                           .gate = gate.view,
                           .up = up.view,
                           .down = down.view,
                           .ids = dids.as<int32_t>(),
                           .ids_stride = kActive,
                           .weights = {dweights.as<float>(), kActive},
                           .hidden = {hidden.as<float>(), kWidth},
                           .y = {dy.as<float>(), kDim},
                           .tokens = kTokens,
                           .n_active = kActive});
    std::vector<double> want(y.begin(), y.end());
    for (int pair = 0; pair < kTokens * kActive; ++pair)
      for (int h = 0; h < kWidth; ++h) {
        const int token = pair / kActive, e = ids[pair];
        if (e < 0) continue;
        double g = 0, u = 0;
        for (int i = 0; i < kDim; ++i) {
          g += x[token * kDim + i] * gate.value(e, h, i);
          u += x[token * kDim + i] * up.value(e, h, i);
        }
        for (int i = 0; i < kDim; ++i)
          want[token * kDim + i] +=
              weights[pair] * g / (1 + std::exp(-g)) * u * down.value(e, i, h);
      }
    const double largest = std::abs(*std::max_element(
        want.begin(), want.end(), [](double a, double b) { return std::abs(a) < std::abs(b); }));
    expect_close(from_gpu<float>(stream, dy), want, 1e-5 * largest);
  }
}

// Two sequences on shuffled pages; unused rows are NaN.
TEST(Plain, AttentionSeesItsOwnPast) {
  constexpr int kHeads = 3, kRank = 150, kRope = 10, kDim = kRank + kRope, kStride = 168;
  constexpr int kPage = 16, kMaxPages = 20;
  Stream stream;
  const std::vector<int32_t> positions = {0, 1, 130, 299, 15}, sequence_of = {0, 0, 1, 1, 1};
  const int n_tokens = static_cast<int>(positions.size());
  std::vector<int32_t> pages(2 * kMaxPages);
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), generator);
  std::vector<bf16> cache(pages.size() * kPage * kStride, bf16{0xffff});
  const auto row_of = [&](int sequence, int position) {
    return (int64_t{pages[sequence * kMaxPages + position / kPage]} * kPage + position % kPage) *
           kStride;
  };
  // Later keys are larger, so the largest score is not among the first.
  for (const auto& [sequence, length] : {std::pair{0, 2}, {1, 300}})
    for (int t = 0; t < length; ++t)
      for (int i = 0; i < kDim; ++i)
        cache[row_of(sequence, t) + i] =
            narrow(std::normal_distribution<float>(0, t < 128 ? 1 : 3)(generator));
  const auto q = random_floats(n_tokens * kHeads * kRank),
             q_rope = random_floats(n_tokens * kHeads * kRope);
  const Buffer dq = on_gpu(stream, q), drope = on_gpu(stream, q_rope),
               dcache = on_gpu(stream, cache), dpages = on_gpu(stream, pages),
               dpositions = on_gpu(stream, positions), dsequences = on_gpu(stream, sequence_of),
               out = nans_on_gpu<float>(n_tokens * kHeads * kRank);
  plain_attention(stream, {.q = {dq.as<float>() + kHeads * kRank, kRank},
                           .q_rope = {drope.as<float>() + kHeads * kRope, kRope},
                           .cache = dcache.as<bf16>(),
                           .cache_stride = kStride,
                           .at = {.sequence_of = dsequences.as<int32_t>(),
                                  .places = dpositions.as<int32_t>(),
                                  .pages = dpages.as<int32_t>(),
                                  .pages_stride = kMaxPages,
                                  .page_size = kPage},
                           .out = {out.as<float>() + kHeads * kRank, kRank},
                           .first_token = 1,
                           .n_tokens = n_tokens - 1,
                           .n_heads = kHeads,
                           .rank = kRank,
                           .rope_dim = kRope,
                           .scale = 0.1f});
  const auto got = from_gpu<float>(stream, out);
  for (int row = 0; row < n_tokens * kHeads; ++row) {
    const int token = row / kHeads, n_keys = positions[token] + 1;
    if (token == 0) {
      for (int i = 0; i < kRank; ++i) ASSERT_TRUE(std::isnan(got[row * kRank + i]));
      continue;
    }
    std::vector<double> p(n_keys), want(kRank);
    double sum = 0;
    for (int t = 0; t < n_keys; ++t) {
      const bf16* key = &cache[row_of(sequence_of[token], t)];
      double score = 0;
      for (int i = 0; i < kDim; ++i)
        score += widen(key[i]) *
                 double{i < kRank ? q[row * kRank + i] : q_rope[row * kRope + i - kRank]};
      sum += p[t] = std::exp(score * 0.1);
    }
    for (int t = 0; t < n_keys; ++t)
      for (int i = 0; i < kRank; ++i)
        want[i] += p[t] / sum * widen(cache[row_of(sequence_of[token], t) + i]);
    for (int i = 0; i < kRank; ++i) ASSERT_NEAR(got[row * kRank + i], want[i], 1e-5);
  }
}

}  // namespace
}  // namespace tandem::gpu
