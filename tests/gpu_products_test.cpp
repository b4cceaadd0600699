// Products on the GPU against double precision: ragged shapes, all FP8 codes, NaN in every output
// and in everything that must not be read.
#include "gpu_kernels/products/products.h"
#include "tests/check_close.h"
#include "tests/gpu_weights.h"

namespace tandem::gpu::test {
namespace {

using tandem::test::expect_close;

// A float sum of n products in any order, also truncated as in tensor cores, has an error of at
// most n units of 2^-23 of the sum of magnitudes; blocks of 16 columns are summed first.
double sum_error(int n) { return (n / 16 + 20) * std::exp2(-23); }

struct Expected {
  std::vector<double> values, bounds;
  void add(double value, double magnitude, int n_terms) {
    values.push_back(value);
    bounds.push_back(magnitude * sum_error(n_terms) + 1e-37);
  }
};

// x w^T with x rounded to BF16.
Expected product_of_rounded(const Rows& x, const RandomWeight& w, int n_tokens,
                            const WeightCase& c) {
  Expected want;
  for (int t = 0; t < n_tokens; ++t)
    for (int r = 0; r < c.rows; ++r) {
      double sum = 0, magnitude = 0;
      for (int i = 0; i < c.cols; ++i) {
        const double product = rounded(x.at(t, i)) * w.at(r, i);
        sum += product;
        magnitude += std::abs(product);
      }
      want.add(sum, magnitude, c.cols);
    }
  return want;
}

// The [rows, cols] numbers of an output; all others must still be NaN.
std::vector<float> written(const std::vector<float>& all, int64_t rows, int64_t cols,
                           int64_t stride) {
  std::vector<float> out;
  for (size_t i = 0; i < all.size(); ++i) {
    const int64_t row = static_cast<int64_t>(i) / stride, col = static_cast<int64_t>(i) % stride;
    if (row < rows && col < cols)
      out.push_back(all[i]);
    else
      EXPECT_TRUE(std::isnan(all[i])) << "written at " << row << ", " << col;
  }
  return out;
}

// What a product of few tokens does beside one matrix.
struct Beside {
  Second second = Second::kNone;
  int rows_2 = 0;  // kBeside
  bool normalises = false;
};

class GpuProducts : public ::testing::Test {
 protected:
  void skinny(int n_tokens, const WeightCase& c, int n_multiprocessors, int64_t pad = 4,
              const Beside& beside = {});
  void exact(int n_tokens, const WeightCase& c);
  void per_head(int n_tokens, int heads, int rows_each, int first, int out, const WeightCase& c);
  void per_head_transposed(int n_tokens, int heads, int rows_each, int x_cols, const WeightCase& c);
  void matrix(int n_tokens, const WeightCase& c, int n_multiprocessors);

  Stream stream_;
  std::mt19937 rng_{11};
};

// x / sqrt(mean(x^2) + eps) * gain in double precision, rounded to float.
Rows normalised(const Rows& x, const std::vector<float>& gain, int n_tokens, int cols, float eps) {
  Rows out = x;
  for (int t = 0; t < n_tokens; ++t) {
    double squares = 0;
    for (int i = 0; i < cols; ++i) squares += double{x.at(t, i)} * x.at(t, i);
    for (int i = 0; i < cols; ++i)
      out.values[t * x.stride + i] =
          static_cast<float>(x.at(t, i) / std::sqrt(squares / cols + eps) * gain[i]);
  }
  return out;
}

// Normalised x is rounded to BF16 from a float that differs in its last bits: one step of 2^-8
// more.
void GpuProducts::skinny(int n_tokens, const WeightCase& c, int n_multiprocessors, int64_t pad,
                         const Beside& beside) {
  SCOPED_TRACE(testing::Message() << n_tokens << " tokens, " << c.rows << " x " << c.cols);
  WeightCase c_2 = c;
  if (beside.second == Second::kBeside) c_2.rows = beside.rows_2;
  const RandomWeight w(stream_, rng_, c), w_2(stream_, rng_, c_2);
  const Rows x(rng_, n_tokens, c.cols, 1, pad);
  const std::vector<float> gain = Rows(rng_, 1, c.cols, 1, 0).values;
  const int64_t out_stride = c.rows + 3, out_2_stride = c_2.rows + 2;
  const OnGpuBuffer<float> x_on_gpu(stream_, x.values), gain_on_gpu(stream_, gain);
  const OnGpuBuffer<uint32_t> counters(stream_, std::vector<uint32_t>(kCounters, 0));
  SkinnyArgs args = {.x = x_on_gpu.data(),
                     .w = w.view(),
                     .out = nullptr,
                     .x_stride = x.stride,
                     .out_stride = out_stride,
                     .n_tokens = n_tokens,
                     .workspace = {},
                     .n_multiprocessors = n_multiprocessors,
                     .second = beside.second,
                     .out_2_stride = out_2_stride,
                     .gain = beside.normalises ? gain_on_gpu.data() : nullptr,
                     .eps = 1e-6f};
  if (beside.second != Second::kNone) args.w_2 = w_2.view();
  const OnGpuBuffer<float> partial(skinny_partials(args) + 1);
  args.workspace = {partial.data(), counters.data()};
  const Rows& used = beside.normalises ? normalised(x, gain, n_tokens, c.cols, args.eps) : x;
  Expected want = product_of_rounded(used, w, n_tokens, c);
  Expected want_2 = product_of_rounded(used, w_2, n_tokens, c_2);
  if (beside.normalises)
    for (Expected* e : {&want, &want_2})
      for (double& bound : e->bounds) bound += bound / sum_error(c.cols) * std::exp2(-8);
  if (beside.second == Second::kGated)
    for (size_t i = 0; i < want.values.size(); ++i) {
      const double g = want.values[i], u = want_2.values[i], s = 1 / (1 + std::exp(-g));
      want.values[i] = g * s * u;  // |silu'| < 1.1
      want.bounds[i] = 1.1 * want.bounds[i] * (std::abs(u) + want_2.bounds[i]) +
                       std::abs(g * s) * want_2.bounds[i] + 1e-6 * std::abs(g * s * u);
    }
  for (int run = 0; run < 2; ++run) {  // the second run uses the counters that the first left
    const OnGpuBuffer<float> out(n_tokens * out_stride), out_2(n_tokens * out_2_stride);
    args.out = out.data();
    if (beside.second == Second::kBeside) args.out_2 = out_2.data();
    skinny_product(stream_, args);
    expect_close(written(out.values(stream_), n_tokens, c.rows, out_stride), want.values,
                 want.bounds);
    if (beside.second == Second::kBeside)
      expect_close(written(out_2.values(stream_), n_tokens, c_2.rows, out_2_stride), want_2.values,
                   want_2.bounds);
  }
}

TEST_F(GpuProducts, SkinnyFp8) {
  skinny(1, {.rows = 128, .cols = 256, .type = kFp8}, 1);
  skinny(3, {.rows = 130, .cols = 200, .type = kFp8, .row0 = 120}, 1);
  skinny(8, {.rows = 33, .cols = 1024, .type = kFp8, .row0 = 7}, 4);
  skinny(9, {.rows = 257, .cols = 393, .type = kFp8, .row0 = 64}, 2, 1);
  skinny(16, {.rows = 16, .cols = 16, .type = kFp8}, 132);
  skinny(1, {.rows = 1, .cols = 1, .type = kFp8}, 132);
  skinny(2, {.rows = 40, .cols = 1500, .type = kFp8, .block = 64}, 8);
}
TEST_F(GpuProducts, SkinnyFp8ExtremeScales) {
  skinny(2, {.rows = 24, .cols = 300, .type = kFp8, .scale = 1e-30f}, 4);
  skinny(2, {.rows = 24, .cols = 300, .type = kFp8, .scale = 1e30f}, 4);
}
TEST_F(GpuProducts, SkinnyBf16) {
  skinny(1, {.rows = 128, .cols = 136, .type = kBf16}, 1);
  skinny(7, {.rows = 61, .cols = 130, .type = kBf16}, 3, 1);
  skinny(13, {.rows = 140, .cols = 1100, .type = kBf16}, 4);
}

TEST_F(GpuProducts, SkinnyPairs) {
  const auto beside = [](int rows) { return Beside{Second::kBeside, rows}; };
  skinny(1, {.rows = 128, .cols = 256, .type = kFp8}, 1, 4, beside(128));
  skinny(3, {.rows = 130, .cols = 1700, .type = kFp8, .row0 = 120}, 4, 4, beside(57));
  skinny(9, {.rows = 7, .cols = 393, .type = kFp8, .row0 = 64}, 2, 1, beside(300));
  skinny(16, {.rows = 200, .cols = 1100, .type = kBf16}, 9, 4, beside(129));
}
TEST_F(GpuProducts, SkinnyGated) {
  const Beside gated = {Second::kGated};
  skinny(1, {.rows = 64, .cols = 256, .type = kFp8, .scale = 0.1f}, 1, 4, gated);
  skinny(3, {.rows = 65, .cols = 1700, .type = kFp8, .row0 = 70, .scale = 0.1f}, 4, 4, gated);
  skinny(11, {.rows = 150, .cols = 393, .type = kFp8, .row0 = 64}, 2, 1, gated);
  skinny(16, {.rows = 7, .cols = 1100, .type = kBf16}, 9, 4, gated);
}
TEST_F(GpuProducts, SkinnyNormalised) {
  const Beside normalises = {.normalises = true};
  skinny(1, {.rows = 128, .cols = 256, .type = kFp8}, 1, 4, normalises);
  skinny(9, {.rows = 40, .cols = 1533, .type = kFp8, .row0 = 120}, 4, 1, normalises);
  skinny(16, {.rows = 61, .cols = 130, .type = kBf16}, 3, 4, normalises);
  skinny(2, {.rows = 70, .cols = 1536, .type = kBf16}, 9, 4, {Second::kBeside, 20, true});
}

// R1's matrices in FP8, on the GPUs of docs/measurements/gpu_kernels.md.
TEST(GpuSkinnyShare, BlocksLeaveRoomForTheBandwidth) {
  struct Gpu {
    const char* name;
    int n_multiprocessors;
    double bytes_per_second;
  };
  struct Matrix {
    const char* name;
    int rows, rows_2, cols;
    Second second;
    double share[3];
  };
  const Gpu gpus[] = {{"4090", 128, 1.008e12}, {"5090", 170, 1.792e12}, {"H200", 132, 4.8e12}};
  for (const Matrix& m : {Matrix{"q_a, kv_a", 1536, 576, 7168, Second::kBeside, {.81, .7, .53}},
                          {"q_b", 24576, 0, 1536, Second::kNone, {.89, .75, .62}},
                          {"o", 7168, 0, 16384, Second::kNone, {.91, .87, .71}},
                          {"gate, up", 2048, 2048, 7168, Second::kGated, {.94, .77, .74}},
                          {"down", 7168, 0, 2048, Second::kNone, {.78, .73, .55}},
                          {"dense gate, up", 18432, 18432, 7168, Second::kGated, {.95, .93, .8}},
                          {"dense down", 7168, 0, 18432, Second::kNone, {.93, .92, .76}},
                          {"head", 129280, 0, 7168, Second::kNone, {.95, .94, .83}}}) {
    for (size_t i = 0; i < std::size(gpus); ++i) {
      SkinnyArgs args = {};
      args.w = {.data = nullptr, .stride = m.cols, .type = kFp8, .rows = m.rows, .cols = m.cols};
      args.w_2 = args.w;
      args.w_2.rows = m.rows_2;
      args.second = m.second;
      args.n_tokens = 1;
      args.n_multiprocessors = gpus[i].n_multiprocessors;
      args.bytes_per_second = gpus[i].bytes_per_second;
      EXPECT_NEAR(skinny_share(args), m.share[i], 0.006) << m.name << " on a " << gpus[i].name;
    }
  }
}

void GpuProducts::exact(int n_tokens, const WeightCase& c) {
  SCOPED_TRACE(testing::Message() << n_tokens << " tokens, " << c.rows << " x " << c.cols);
  const RandomWeight w(stream_, rng_, c);
  const Rows x(rng_, n_tokens, c.cols, 1, 1);
  const int64_t out_stride = c.rows + 1;
  const OnGpuBuffer<float> x_on_gpu(stream_, x.values), out(n_tokens * out_stride);
  exact_product(stream_, {.x = x_on_gpu.data(),
                          .w = w.view(),
                          .out = out.data(),
                          .x_stride = x.stride,
                          .out_stride = out_stride,
                          .n_tokens = n_tokens});
  Expected want;
  for (int t = 0; t < n_tokens; ++t)
    for (int r = 0; r < c.rows; ++r) {
      double sum = 0, magnitude = 0;
      for (int i = 0; i < c.cols; ++i) {
        sum += double{x.at(t, i)} * w.at(r, i);
        magnitude += std::abs(x.at(t, i) * w.at(r, i));
      }
      want.add(sum, magnitude, c.cols);
    }
  expect_close(written(out.values(stream_), n_tokens, c.rows, out_stride), want.values,
               want.bounds);
}

TEST_F(GpuProducts, Exact) {
  exact(1, {.rows = 16, .cols = 64, .type = kFloat});
  exact(9, {.rows = 7, .cols = 1301, .type = kFloat});
  exact(3, {.rows = 10, .cols = 133, .type = kBf16});
  exact(17, {.rows = 37, .cols = 130, .type = kFp8, .row0 = 5, .block = 12});
}

// x[t, h] w_h^T: each head has rows_each rows, of which `out_cols` rows from `first` on are used.
void GpuProducts::per_head(int n_tokens, int heads, int rows_each, int first, int out_cols,
                           const WeightCase& c) {
  SCOPED_TRACE(testing::Message() << n_tokens << " tokens, " << heads << " heads");
  const RandomWeight w(stream_, rng_, c);
  const Rows x(rng_, n_tokens * heads, c.cols, 1, 4);
  const int64_t out_stride = out_cols + 1;
  const OnGpuBuffer<float> x_on_gpu(stream_, x.values), out(n_tokens * heads * out_stride);
  per_head_product(stream_, {.x = x_on_gpu.data(),
                             .w = w.view(),
                             .out = out.data(),
                             .x_stride = x.stride,
                             .out_stride = out_stride,
                             .n_tokens = n_tokens,
                             .n_heads = heads,
                             .x_cols = c.cols,
                             .out_cols = out_cols,
                             .first_row = first,
                             .rows_per_head = rows_each,
                             .transposed = false});
  Expected want;
  for (int row = 0; row < n_tokens * heads; ++row)
    for (int r = 0; r < out_cols; ++r) {
      double sum = 0, magnitude = 0;
      for (int i = 0; i < c.cols; ++i) {
        const double product = rounded(x.at(row, i)) * w.at(first + row % heads * rows_each + r, i);
        sum += product;
        magnitude += std::abs(product);
      }
      want.add(sum, magnitude, c.cols);
    }
  expect_close(written(out.values(stream_), n_tokens * heads, out_cols, out_stride), want.values,
               want.bounds);
}

TEST_F(GpuProducts, PerHead) {
  per_head(1, 3, 160, 32, 128, {.rows = 480, .cols = 512, .type = kFp8});
  per_head(18, 2, 56, 16, 40, {.rows = 112, .cols = 130, .type = kFp8, .row0 = 100});
  per_head(5, 4, 20, 4, 16, {.rows = 80, .cols = 136, .type = kBf16});
}

// x[t, h] w_h: the sum runs over the first x_cols rows of each head.
void GpuProducts::per_head_transposed(int n_tokens, int heads, int rows_each, int x_cols,
                                      const WeightCase& c) {
  SCOPED_TRACE(testing::Message() << n_tokens << " tokens, " << heads << " heads");
  const RandomWeight w(stream_, rng_, c);
  const Rows x(rng_, n_tokens * heads, x_cols, 1, 3);
  const int64_t out_stride = c.cols + 1;
  const OnGpuBuffer<float> x_on_gpu(stream_, x.values), out(n_tokens * heads * out_stride);
  per_head_product(stream_, {.x = x_on_gpu.data(),
                             .w = w.view(),
                             .out = out.data(),
                             .x_stride = x.stride,
                             .out_stride = out_stride,
                             .n_tokens = n_tokens,
                             .n_heads = heads,
                             .x_cols = x_cols,
                             .out_cols = c.cols,
                             .first_row = 0,
                             .rows_per_head = rows_each,
                             .transposed = true});
  Expected want;
  for (int row = 0; row < n_tokens * heads; ++row)
    for (int col = 0; col < c.cols; ++col) {
      double sum = 0, magnitude = 0;
      for (int i = 0; i < x_cols; ++i) {
        const int r = row % heads * rows_each + i;
        const double scale = c.type == kFp8 ? w.scale_of(r, col) : 1;
        const float scaled = x.at(row, i) * static_cast<float>(scale);
        const double product = rounded(scaled) * w.at(r, col) / scale;
        sum += product;
        magnitude += std::abs(product);
      }
      want.add(sum, magnitude, x_cols);
    }
  expect_close(written(out.values(stream_), n_tokens * heads, c.cols, out_stride), want.values,
               want.bounds);
}

TEST_F(GpuProducts, PerHeadTransposed) {
  per_head_transposed(1, 2, 160, 128, {.rows = 320, .cols = 512, .type = kFp8});
  per_head_transposed(17, 3, 56, 33, {.rows = 168, .cols = 130, .type = kFp8, .row0 = 90});
  per_head_transposed(3, 4, 20, 4, {.rows = 80, .cols = 140, .type = kBf16});
}

void GpuProducts::matrix(int n_tokens, const WeightCase& c, int n_multiprocessors) {
  SCOPED_TRACE(testing::Message() << n_tokens << " tokens, " << c.rows << " x " << c.cols);
  const RandomWeight w(stream_, rng_, c);
  const Rows x(rng_, n_tokens, c.cols, 1, 1);
  const int64_t x_stride = (c.cols + 15) / 16 * 16 + 16, out_stride = c.rows + 1;
  const OnGpuBuffer<float> x_on_gpu(stream_, x.values);
  const OnGpuBuffer<float> partial(matrix_partials(w.view(), n_tokens, n_multiprocessors) + 1);
  const OnGpuBuffer<uint32_t> counters(stream_, std::vector<uint32_t>(kCounters, 0));
  const OnGpuBuffer<bf16> x_rounded(n_tokens * x_stride);
  round_rows(stream_, {.x = x_on_gpu.data(),
                       .out = x_rounded.data(),
                       .x_stride = x.stride,
                       .out_stride = x_stride,
                       .n_rows = n_tokens,
                       .cols = c.cols});
  const Expected want = product_of_rounded(x, w, n_tokens, c);
  for (int run = 0; run < 2; ++run) {
    const OnGpuBuffer<float> out(n_tokens * out_stride);
    matrix_product(stream_, {.x = x_rounded.data(),
                             .w = w.view(),
                             .out = out.data(),
                             .x_stride = x_stride,
                             .out_stride = out_stride,
                             .n_tokens = n_tokens,
                             .workspace = {partial.data(), counters.data()},
                             .n_multiprocessors = n_multiprocessors});
    expect_close(written(out.values(stream_), n_tokens, c.rows, out_stride), want.values,
                 want.bounds);
  }
}

TEST_F(GpuProducts, MatrixFp8) {
  matrix(17, {.rows = 130, .cols = 300, .type = kFp8, .row0 = 100}, 1);
  matrix(33, {.rows = 72, .cols = 136, .type = kFp8, .row0 = 3}, 1);
  matrix(130, {.rows = 129, .cols = 393, .type = kFp8}, 1);
  matrix(129, {.rows = 136, .cols = 1100, .type = kFp8, .block = 64}, 12);  // columns are shared
  matrix(18, {.rows = 24, .cols = 130, .type = kFp8, .scale = 1e30f}, 1);
}
TEST_F(GpuProducts, MatrixBf16) {
  matrix(20, {.rows = 40, .cols = 130, .type = kBf16}, 1);
  matrix(60, {.rows = 140, .cols = 264, .type = kBf16}, 1);
  matrix(140, {.rows = 33, .cols = 1032, .type = kBf16}, 1);
}

TEST_F(GpuProducts, RoundRows) {
  const Rows x(rng_, 5, 19, 100, 2);
  const OnGpuBuffer<float> on_gpu(stream_, x.values);
  const OnGpuBuffer<bf16> out(5 * 32);
  round_rows(stream_, {on_gpu.data(), out.data(), x.stride, 32, 5, 19});
  const std::vector<bf16> got = out.values(stream_);
  for (int r = 0; r < 5; ++r)
    for (int c = 0; c < 32; ++c)
      EXPECT_EQ(got[r * 32 + product_column(c)].bits, c < 19 ? narrow(x.at(r, c)).bits : 0)
          << r << ", " << c;
}

}  // namespace
}  // namespace tandem::gpu::test
