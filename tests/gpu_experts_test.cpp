// Routed experts on the GPU against double precision: both layouts of rows, experts without rows,
// and the sum over a token's experts.
#include <memory>
#include <numeric>

#include "gpu_kernels/products/products.h"
#include "tests/check_close.h"
#include "tests/gpu_fp8_rows.h"
#include "tests/gpu_weights.h"

namespace tandem::gpu::test {
namespace {

using tandem::test::expect_close;

struct ExpertCase {
  std::vector<int> counts;  // rows of each expert
  int slots;                // 0: rows are sorted by expert
  int dim, hidden;
  Number type;
  int spare_rows = 3;     // rows of the grid beyond the existing ones
  bool fp8_rows = false;  // activations are FP8
  int usual_rows = 0;     // as in ExpertRows

  int n_experts() const { return static_cast<int>(counts.size()); }
  int64_t out_stride() const { return dim + 5; }
  int first_row(int expert) const {
    return slots > 0 ? expert * slots : std::accumulate(counts.begin(), counts.begin() + expert, 0);
  }
  int max_rows() const {
    return slots > 0 ? n_experts() * slots : first_row(n_experts()) + spare_rows;
  }
};

// Error bound of a float sum of n products, also with truncation.
double sum_error(int n, bool fp8_rows) {
  return fp8_rows ? fp8_sum_error(n) : (n / 16 + 20) * std::exp2(-23);
}

class GpuExperts : public ::testing::Test {
 protected:
  void run(const ExpertCase& c);
  void expect_gate_up(const ExpertCase& c);
  void expect_hidden_fp8(const ExpertCase& c);
  void expect_down(const ExpertCase& c);

  Stream stream_;
  std::mt19937 rng_{5};
  std::unique_ptr<RandomWeight> gate_, up_, down_;
  std::vector<int32_t> tokens_;
  std::vector<float> x_;        // [n_tokens, dim]
  std::vector<double> used_x_;  // x_ after rounding
  std::vector<bf16> hidden_;
  Fp8Numbers hidden_fp8_;  // used with FP8 activations
  std::vector<float> out_;
  static constexpr int kTokens = 11;
};

int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

void GpuExperts::run(const ExpertCase& c) {
  SCOPED_TRACE(testing::Message() << c.n_experts() << " experts, " << c.max_rows() << " rows");
  // Small weights bound silu's argument and so its error.
  const WeightCase shape = {.rows = c.hidden,
                            .cols = c.dim,
                            .type = c.type,
                            .scale = (c.type == kFp8 ? 0.01f : 1.f) / std::sqrt(1.f * c.dim),
                            .n_experts = c.n_experts()};
  gate_ = std::make_unique<RandomWeight>(stream_, rng_, shape);
  up_ = std::make_unique<RandomWeight>(stream_, rng_, shape);
  WeightCase turned = shape;
  std::swap(turned.rows, turned.cols);
  down_ = std::make_unique<RandomWeight>(stream_, rng_, turned);

  x_ = random_floats(rng_, kTokens * c.dim, 1);
  std::vector<bf16> x(kTokens * padded(c.dim), bf16{0});
  for (int t = 0; t < kTokens; ++t)
    for (int i = 0; i < c.dim; ++i)
      x[t * padded(c.dim) + product_column(i)] = narrow(x_[t * c.dim + i]);
  tokens_.assign(c.max_rows(), 1 << 30);
  std::vector<int32_t> offsets = {0}, counts;
  for (int e = 0; e < c.n_experts(); ++e) {
    for (int i = 0; i < c.counts[e]; ++i) tokens_[c.first_row(e) + i] = rng_() % kTokens;
    offsets.push_back(offsets.back() + c.counts[e]);
    counts.push_back(c.counts[e]);
  }
  const OnGpuBuffer<bf16> x_on_gpu(stream_, x), hidden(c.max_rows() * padded(c.hidden));
  const OnGpuBuffer<float> x_float(stream_, x_);
  const Fp8RowsOnGpu x_fp8(kTokens, c.dim, 0), hidden_fp8(c.max_rows(), c.hidden, 0);
  const OnGpuBuffer<int32_t> tokens(stream_, tokens_), first(stream_, offsets), n(stream_, counts);
  const OnGpuBuffer<float> out(c.max_rows() * c.out_stride());
  const ExpertRows rows = {.offsets = first.data(),
                           .counts = n.data(),
                           .n_experts = c.n_experts(),
                           .slots = c.slots,
                           .max_rows = c.max_rows(),
                           .usual_rows = c.usual_rows};
  used_x_.clear();
  if (c.fp8_rows) round_rows_fp8(stream_, {x_float.data(), x_fp8.view(), c.dim, kTokens, c.dim});
  const Fp8Numbers rounded_x = x_fp8.values(stream_);
  for (int t = 0; t < kTokens; ++t)
    for (int i = 0; i < c.dim; ++i)
      used_x_.push_back(c.fp8_rows ? rounded_x.at(t, i) : rounded(x_[t * c.dim + i]));
  grouped_gate_up(stream_, {.x = c.fp8_rows ? nullptr : x_on_gpu.data(),
                            .x_fp8 = c.fp8_rows ? x_fp8.view() : Fp8Rows{},
                            .tokens = tokens.data(),
                            .rows = rows,
                            .gate = gate_->experts(),
                            .up = up_->experts(),
                            .hidden = hidden.data(),
                            .x_stride = padded(c.dim),
                            .hidden_stride = padded(c.hidden)});
  if (c.fp8_rows)
    round_hidden_fp8(stream_, {.hidden = hidden.data(),
                               .rows = rows,
                               .out = hidden_fp8.view(),
                               .hidden_stride = padded(c.hidden),
                               .cols = c.hidden});
  grouped_down(stream_, {.hidden = c.fp8_rows ? nullptr : hidden.data(),
                         .hidden_fp8 = c.fp8_rows ? hidden_fp8.view() : Fp8Rows{},
                         .rows = rows,
                         .down = down_->experts(),
                         .out = out.data(),
                         .hidden_stride = padded(c.hidden),
                         .out_stride = c.out_stride()});
  hidden_fp8_ = hidden_fp8.values(stream_);
  hidden_ = hidden.values(stream_);
  out_ = out.values(stream_);
  expect_gate_up(c);
  if (c.fp8_rows) expect_hidden_fp8(c);
  expect_down(c);
}

// silu has slope below 1.1 and its argument has an error; then the product is rounded to BF16.
void GpuExperts::expect_gate_up(const ExpertCase& c) {
  std::vector<double> got, want, bound;
  const double error = sum_error(c.dim, c.fp8_rows);
  for (int e = 0; e < c.n_experts(); ++e)
    for (int row = c.first_row(e); row < c.first_row(e) + c.counts[e]; ++row)
      for (int i = 0; i < c.hidden; ++i) {
        double g = 0, u = 0, g_size = 0, u_size = 0;
        for (int k = 0; k < c.dim; ++k) {
          const double x = used_x_[tokens_[row] * c.dim + k];
          const double gate = x * gate_->at(e * c.hidden + i, k),
                       up = x * up_->at(e * c.hidden + i, k);
          g += gate, u += up, g_size += std::abs(gate), u_size += std::abs(up);
        }
        const double silu = g / (1 + std::exp(-g));
        got.push_back(widen(hidden_[row * padded(c.hidden) + product_column(i)]));
        want.push_back(silu * u);
        bound.push_back(std::abs(silu * u) / 256 +
                        2 * error * (g_size * std::abs(u) + u_size * std::abs(silu)) + 1e-30);
      }
  expect_close(got, want, bound);
}

// Existing rows must equal the host's rounding exactly; all others must still be NaN.
void GpuExperts::expect_hidden_fp8(const ExpertCase& c) {
  const Fp8Numbers& got = hidden_fp8_;
  std::vector<bool> used(c.max_rows(), false);
  for (int e = 0; e < c.n_experts(); ++e)
    for (int i = 0; i < c.counts[e]; ++i) used[c.first_row(e) + i] = true;
  for (int row = 0; row < c.max_rows(); ++row)
    for (int64_t first = 0; first < c.hidden; first += kFp8Block) {
      const auto value = [&](int64_t i) {
        return widen(hidden_[row * padded(c.hidden) + product_column(static_cast<int>(i))]);
      };
      const int64_t end = std::min<int64_t>(first + kFp8Block, c.hidden);
      const float scale = got.scales[row * got.scale_stride + first / kFp8Block];
      float largest = 0;
      for (int64_t i = first; i < end; ++i) largest = std::max(largest, std::abs(value(i)));
      if (!used[row]) {
        ASSERT_TRUE(std::isnan(scale)) << "written: row " << row;
        continue;
      }
      ASSERT_EQ(scale, largest > 0 ? largest / 448 : 1) << row;
      for (int64_t i = first; i < end; ++i)
        ASSERT_EQ(got.codes[row * got.stride + i].bits, nearest_e4m3(value(i) / scale).bits)
            << row << ", " << i;
    }
}

void GpuExperts::expect_down(const ExpertCase& c) {
  std::vector<double> got, want, bound;
  std::vector<bool> used(c.max_rows(), false);
  for (int e = 0; e < c.n_experts(); ++e)
    for (int row = c.first_row(e); row < c.first_row(e) + c.counts[e]; ++row) {
      used[row] = true;
      for (int i = 0; i < c.dim; ++i) {
        double sum = 0, magnitude = 0;
        for (int k = 0; k < c.hidden; ++k) {
          const double hidden = c.fp8_rows
                                    ? hidden_fp8_.at(row, k)
                                    : widen(hidden_[row * padded(c.hidden) + product_column(k)]);
          const double product = hidden * down_->at(e * c.dim + i, k);
          sum += product, magnitude += std::abs(product);
        }
        got.push_back(out_[row * c.out_stride() + i]);
        want.push_back(sum);
        bound.push_back(magnitude * sum_error(c.hidden, c.fp8_rows) + 1e-30);
      }
    }
  expect_close(got, want, bound);
  for (int row = 0; row < c.max_rows(); ++row)
    for (int64_t i = used[row] ? c.dim : 0; i < c.out_stride(); ++i)
      ASSERT_TRUE(std::isnan(out_[row * c.out_stride() + i]))
          << "written: column " << i << " of row " << row;
}

TEST_F(GpuExperts, SortedRows) {
  run({.counts = {0, 3, 0, 40, 1}, .slots = 0, .dim = 136, .hidden = 24, .type = kFp8});
  run({.counts = {2, 70, 64}, .slots = 0, .dim = 64, .hidden = 72, .type = kFp8});
  run({.counts = {129, 133}, .slots = 0, .dim = 96, .hidden = 40, .type = kFp8});
  run({.counts = {5, 0, 33}, .slots = 0, .dim = 72, .hidden = 36, .type = kBf16});
}
TEST_F(GpuExperts, MoreRowsThanUsual) {
  ExpertCase c = {.counts = {129, 133}, .slots = 0, .dim = 96, .hidden = 40, .type = kFp8};
  c.usual_rows = 16;
  run(c);
  c = {.counts = {1, 0, 170}, .slots = 0, .dim = 64, .hidden = 24, .type = kBf16};
  c.usual_rows = 40;
  run(c);
}

// The tile has the rows of an expert, not those that all pairs would give these experts.
TEST(GroupedTiles, AreAsTallAsAnExpertsRows) {
  const auto rows = [](int n_experts, int max_rows, int usual_rows) {
    return grouped_tile_rows(
        {.n_experts = n_experts, .max_rows = max_rows, .usual_rows = usual_rows});
  };
  EXPECT_EQ(rows(20, 4096, 16), 32) << "20 of R1's 256 experts, 512 tokens";
  EXPECT_EQ(rows(20, 4096, 0), 128);
  EXPECT_EQ(rows(256, 4096, 16), 32);
  EXPECT_EQ(rows(20, 16384, 64), 64);
  EXPECT_EQ(rows(20, 32768, 128), 128);
  EXPECT_EQ(grouped_tile_rows({.n_experts = 4, .slots = 40, .max_rows = 160}), 64);
}

TEST_F(GpuExperts, ManyExperts) {
  std::vector<int> counts(70, 0);
  counts[0] = 1, counts[31] = 2, counts[32] = 1, counts[69] = 35;
  run({.counts = counts, .slots = 0, .dim = 16, .hidden = 8, .type = kFp8});
}
TEST_F(GpuExperts, Slots) {
  run({.counts = {0, 8, 3}, .slots = 8, .dim = 200, .hidden = 136, .type = kFp8});
  run({.counts = {35, 40}, .slots = 40, .dim = 64, .hidden = 32, .type = kBf16});
}

TEST_F(GpuExperts, Fp8Rows) {
  if (!open_gpu().fp8_mma) GTEST_SKIP() << "no FP8 mma";
  const auto fp8 = [&](const std::vector<int>& counts, int slots, int dim, int hidden) {
    run({.counts = counts,
         .slots = slots,
         .dim = dim,
         .hidden = hidden,
         .type = kFp8,
         .fp8_rows = true});
  };
  fp8({0, 3, 0, 40, 1}, 0, 136, 24);
  fp8({2, 70, 64}, 0, 64, 200);
  fp8({129, 133}, 0, 96, 40);
  fp8({0, 8, 3}, 8, 200, 136);
}

TEST_F(GpuExperts, CombineAddsInTheOrderOfTheExperts) {
  const std::vector<float> rows = {1e8f, 1, -1e8f, 2, 5, 6, NAN, NAN};  // [4, 2]
  const std::vector<int32_t> row_of = {0, 2, 1, 2, -1, 1};              // [2, 3]
  const std::vector<float> weights = {1, 1, 0.5f, 2, NAN, 1};
  for (const bool add : {false, true}) {
    const OnGpuBuffer<float> on_gpu(stream_, rows), w(stream_, weights);
    const OnGpuBuffer<float> y(stream_, std::vector<float>(4, add ? 1.f : NAN));
    const OnGpuBuffer<int32_t> ids(stream_, row_of);
    combine_experts(stream_, {.rows = on_gpu.data(),
                              .row_of = ids.data(),
                              .weights = w.data(),
                              .y = y.data(),
                              .row_stride = 2,
                              .y_stride = 2,
                              .n_tokens = 2,
                              .n_active = 3,
                              .cols = 2,
                              .add = add});
    const float one = add ? 1.f : 0.f;
    EXPECT_EQ(y.values(stream_),
              (std::vector<float>{((one + 1e8f) + 5) + 0.5f * -1e8f, one + 1 + 6 + 1,
                                  (one + 10) + -1e8f, one + 12 + 2}));
  }
}

// Odd numbers of columns, several blocks of columns, padded rows. Numbers are integers, so sums are
// exact.
TEST_F(GpuExperts, CombineOfManyColumns) {
  for (const int cols : {255, 257, 1025}) {
    constexpr int kRowsOfY = 3, kActive = 8, kRows = 20;
    const int64_t row_stride = cols + 3, y_stride = cols + 1;
    const auto some = [&](int64_t n) {
      std::vector<float> v(n);
      for (float& e : v) e = static_cast<float>(static_cast<int>(rng_() % 15) - 7);
      return v;
    };
    const auto rows = some(kRows * row_stride), weights = some(kRowsOfY * kActive),
               before = some(kRowsOfY * y_stride);
    std::vector<int32_t> row_of;
    for (int i = 0; i < kRowsOfY * kActive; ++i)
      row_of.push_back(static_cast<int32_t>(rng_() % (kRows + 1)) - 1);
    const OnGpuBuffer<float> on_gpu(stream_, rows), w(stream_, weights), y(stream_, before);
    const OnGpuBuffer<int32_t> ids(stream_, row_of);
    combine_experts(stream_, {.rows = on_gpu.data(),
                              .row_of = ids.data(),
                              .weights = w.data(),
                              .y = y.data(),
                              .row_stride = row_stride,
                              .y_stride = y_stride,
                              .n_tokens = kRowsOfY,
                              .n_active = kActive,
                              .cols = cols,
                              .add = true});
    std::vector<float> want = before;
    for (int t = 0; t < kRowsOfY; ++t)
      for (int i = 0; i < kActive; ++i)
        for (int c = 0; c < cols; ++c)
          if (const int32_t row = row_of[t * kActive + i]; row >= 0)
            want[t * y_stride + c] += weights[t * kActive + i] * rows[row * row_stride + c];
    EXPECT_EQ(y.values(stream_), want) << cols << " columns";
  }
}

}  // namespace
}  // namespace tandem::gpu::test
