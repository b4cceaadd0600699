// Every kernel of every instruction set, native where this machine has it and emulated elsewhere,
// against double precision. Bounds: a float sum of k products has an error of at most k eps sum
// |x||w|, and about sqrt(k) of that if errors are independent; the tests use 4 sqrt(k).
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <set>
#include <sstream>

#include "cpu_kernels/peaks.h"
#include "tests/check_close.h"
#include "tests/kernel_cases.h"
#include "tests/kernel_tables.h"

namespace tandem::test {
namespace {

class KernelTest : public testing::TestWithParam<NamedTable> {
 protected:
  const cpu::KernelTable& t_ = GetParam().kernels;
  std::mt19937 rng_{1};

  std::vector<float> normal(size_t n, float deviation = 1) {
    return test::normal(rng_, n, deviation);
  }
  // Numbers of either sign, of magnitudes from `least` to twice that.
  std::vector<float> of_size(size_t n, float least) {
    std::uniform_real_distribution<float> size(least, 2 * least);
    std::vector<float> v(n);
    for (float& x : v) x = rng_() % 2 ? size(rng_) : -size(rng_);
    return v;
  }
};

// 352 columns are two blocks of 128 and three AMX tiles of 32.
TEST_P(KernelTest, GemmOfEveryTypeAndShape) {
  const Shape shapes[] = {{1, 8, 64},    {1, 1, 1},     {2, 3, 7},     {3, 8, 512},    {4, 9, 513},
                          {5, 17, 129},  {7, 32, 640},  {33, 5, 100},  {31, 24, 1030}, {6, 75, 255},
                          {1, 130, 384}, {300, 20, 70}, {19, 40, 128}, {33, 34, 352}};
  for (const DType dtype : kTypes) {
    for (const auto [m, n, k] : shapes) {
      for (const cpu::ActivationType type : activations(t_, dtype)) {
        const int block = k > 300 ? 128 : k > 100 && k != 128 ? 32 : 20;
        RandomModel store(with_block(block), dtype);
        const int skip = n % 2 ? 2 : 18;  // first row of w that the product uses
        // The matrix is a part of a larger one and begins within a block of scales.
        const int first = m % 2 ? 44 : 0;
        const QuantView stored =
            columns_from(store, random_weight(store, n + skip + 7, k + first, dtype), first)
                .rows_from(7, n + skip);
        const Packed packed(t_, stored);

        const int x_stride = k + 3, out_stride = n + 2;
        // Small numbers are included because kernels may keep scaled weights.
        std::vector<float> numbers = normal(2 * m * x_stride, k % 2 ? 1e-10f : 1);
        for (int i = 0; i < 2 * m; ++i) std::fill_n(&numbers[i * x_stride + k], 3, kNaN);
        Rows x(t_, type, numbers, 2 * m, x_stride, k);
        std::vector<int32_t> rows(m);
        for (int i = 0; i < m; ++i) rows[i] = (i * 7 + 1) % (2 * m);
        x.view.rows = rows.data();
        std::vector<float> out(m * out_stride, kNaN);
        t_.gemm({x.view, kernel_weight(packed.w), skip, out.data(), out_stride, m, n, k});

        std::vector<double> got, want, bound;
        for (int i = 0; i < m; ++i) {
          for (int j = 0; j < n; ++j) {
            double sum = 0, size = 0;
            for (int c = 0; c < k; ++c) {
              const double product = x.values[rows[i] * x_stride + c] * value(stored, skip + j, c);
              sum += product;
              size += std::fabs(product);
            }
            got.push_back(out[i * out_stride + j]);
            want.push_back(sum);
            bound.push_back((4 * std::sqrt(k) + 2) * kEps * size + 1e-30);
          }
          EXPECT_TRUE(std::isnan(out[i * out_stride + n])) << "wrote past the row";
        }
        SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << m << "x" << n << "x" << k
                                        << " activation " << static_cast<int>(type));
        expect_close(got, want, bound);
      }
    }
  }
}

TEST_P(KernelTest, GemmTransposed) {
  for (const DType dtype : kTypes) {
    for (const auto [m, n, k] : {Shape{1, 128, 512}, Shape{3, 20, 40}, Shape{5, 65, 67},
                                 Shape{2, 1, 3}, Shape{2, 290, 35}}) {
      RandomModel store(with_block(32), dtype);
      const QuantView w = columns_from(store, random_weight(store, n + 1, k + 44, dtype), 44);
      const Packed packed(t_, w);
      const std::vector<float> x = normal(m * n);
      std::vector<float> out(m * k, kNaN);
      t_.gemm_transposed({{x.data(), n * 4, cpu::ActivationType::kF32, nullptr},
                          kernel_weight(packed.w),
                          1,
                          out.data(),
                          k,
                          m,
                          n,
                          k});
      std::vector<double> want, bound;
      for (int i = 0; i < m; ++i)
        for (int c = 0; c < k; ++c) {
          double sum = 0, size = 0;
          for (int j = 0; j < n; ++j) {
            const double product = x[i * n + j] * value(w, 1 + j, c);
            sum += product;
            size += std::fabs(product);
          }
          want.push_back(sum);
          bound.push_back((4 * std::sqrt(n) + 2) * kEps * size + 1e-30);
        }
      SCOPED_TRACE(testing::Message() << name_of(dtype) << " " << m << "x" << n << "x" << k);
      expect_close(out, want, bound);
    }
  }
}

// The bits of a row do not depend on the other rows or on how output columns are divided: batches
// of 1, 2, .. 10 rows use every kernel of a table. Tiny rows, of all sizes and of one,
// cover the flushing of subnormal sums.
TEST_P(KernelTest, GemmBitsDoNotDependOnTheBatch) {
  // The second batch ends with a chunk of few rows.
  for (const auto& [m, n, k] : {std::tuple{55, 144, 700}, {260, 80, 130}})
    for (const DType dtype : kTypes) {
      RandomModel store(with_block(128), dtype);
      const Packed packed(t_, random_weight(store, n, k, dtype));
      const cpu::Weight w = kernel_weight(packed.w);
      for (const cpu::ActivationType type : activations(t_, dtype)) {
        const std::vector<float> inputs[] = {normal(m * k), normal(m * k, 1e-37f),
                                             of_size(m * k, 0x1p-120f)};
        for (const std::vector<float>& input : inputs) {
          Rows x(t_, type, input, m, k, k);
          std::vector<float> all(m * n), some(m * n);
          t_.gemm({x.view, w, 0, all.data(), n, m, n, k});
          for (int first = 0, rows = 1; first < m; first += rows++) {
            cpu::Activations part = x.view;
            part.data = static_cast<const char*>(part.data) + first * part.stride;
            const int count = std::min(rows, m - first);
            const int cut = count == 1 ? 16 : 5;
            t_.gemm({part, w, 0, some.data() + first * n, n, count, cut, k});
            t_.gemm({part, w, cut, some.data() + first * n + cut, n, count, n - cut, k, &w});
          }
          for (int i = 0; i < m * n; ++i)
            ASSERT_EQ(std::bit_cast<uint32_t>(some[i]), std::bit_cast<uint32_t>(all[i]))
                << name_of(dtype) << " row " << i / n << " of " << m << " column " << i % n;
        }
      }
    }
}

// Tiled rows give the bits of the rows that they were made from, in another order and with their
// own scales. What lies behind the tiles may be read, but counts for nothing.
TEST_P(KernelTest, GemmOfTiledRows) {
  if (!t_.tile) return;
  const int n = 80, k = 700, most = 75;
  for (const DType dtype : kTypes) {
    RandomModel store(with_block(128), dtype);
    const Packed packed(t_, random_weight(store, n, k, dtype));
    const cpu::Weight w = kernel_weight(packed.w);
    if (!t_.takes_tiles(w)) continue;
    if (dtype == DType::kF8E4M3) {  // scales that begin within a tile of columns
      const Packed part(t_, columns_from(store, random_weight(store, n, k + 44, dtype), 44));
      EXPECT_FALSE(t_.takes_tiles(kernel_weight(part.w)));
    }
    const cpu::ActivationType type = t_.activation[static_cast<int>(w.type)];
    const Rows x(t_, type, normal(most * k), most, k, k);
    std::vector<int32_t> order(most);
    for (int i = 0; i < most; ++i) order[i] = (i * 7 + 3) % most;
    for (const int m : {1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 50, 64, 70}) {
      cpu::GemmArgs product = {x.view, w, 0, nullptr, n, m, n, k};
      product.x.rows = order.data();
      std::vector<float> want(m * n), got(m * n, kNaN);
      product.out = want.data();
      t_.gemm(product);
      std::vector<uint8_t> room(m * x.view.stride + cpu::kTileBytes + 64, 0xff);  // NaN
      uint8_t* tiles = room.data();
      tiles += -reinterpret_cast<uintptr_t>(tiles) % 64;
      for (int i = 0; i < m; i += cpu::kTileRows)
        t_.tile({product.x, i, std::min(cpu::kTileRows, m - i), k, tiles + i * x.view.stride});
      product.x.data = tiles;
      product.x.tiled = true;
      product.out = got.data();
      t_.gemm(product);
      for (int i = 0; i < m * n; ++i)
        ASSERT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(want[i]))
            << name_of(dtype) << " row " << i / n << " of " << m << " column " << i % n;
    }
  }
}

// One row has its own kernel for whole groups of panels with regular scales, and the general kernel
// where a part of a matrix begins within a block of scales.
TEST_P(KernelTest, GemmOfOneRowOfAPartOfAMatrix) {
  const int n = 192, k = 300;
  for (const DType dtype : kTypes) {
    for (const auto& [row0, col0] : {std::pair{0, 0}, {7, 0}, {112, 0}, {0, 44}, {0, 128}}) {
      RandomModel store(with_block(128), dtype);
      const QuantView whole = random_weight(store, row0 + n, k + col0, dtype);
      const Packed packed(t_, columns_from(store, whole, col0).rows_from(row0, n));
      const cpu::Weight w = kernel_weight(packed.w);
      for (const cpu::ActivationType type : activations(t_, dtype)) {
        Rows x(t_, type, normal(2 * k), 2, k, k);
        std::vector<float> want(2 * n), got(n + 1, kNaN);
        t_.gemm({x.view, w, 0, want.data(), n, 2, n, k});
        const int32_t second = 1;
        x.view.rows = &second;
        t_.gemm({x.view, w, 0, got.data(), n, 1, 64, k});
        t_.gemm({x.view, w, 64, got.data() + 64, n, 1, 128, k});
        for (int i = 0; i < n; ++i)
          ASSERT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(want[n + i]))
              << name_of(dtype) << " from " << row0 << ", " << col0 << " column " << i;
        EXPECT_TRUE(std::isnan(got[n])) << "wrote past the row";
      }
    }
  }
}

// Memory whose unwritten pages take no space.
class SparseMemory {
 public:
  explicit SparseMemory(int64_t n_bytes)
      : n_bytes_(static_cast<size_t>(n_bytes)),
        data_(mmap(nullptr, n_bytes_, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  SparseMemory(const SparseMemory&) = delete;
  ~SparseMemory() {
    if (exists()) munmap(data_, n_bytes_);
  }
  bool exists() const { return data_ != MAP_FAILED; }
  void* data() const { return data_; }

 private:
  const size_t n_bytes_;
  void* const data_;
};

// The last rows of a matrix larger than 4 GiB are packed and multiplied like those of a small one.
// An address computed in 32 bits would read zeros. (Kimi-K2's head has 2.3 GB.)
TEST_P(KernelTest, RowsBeyondFourGibibytes) {
  constexpr int kRows = 80, kCols = 300, kMaxRows = 3;
  const bool panels = t_.layout == cpu::Layout::kPanels;
  for (const DType dtype : kTypes) {
    RandomModel store(with_block(128), dtype);
    QuantView stored = random_weight(store, kRows, kCols, dtype);
    stored.scale = {};
    const Packed small(t_, stored);
    cpu::Weight w = kernel_weight(small.w);
    w.scales = nullptr;
    const int64_t n_before = (int64_t{1} << 32) / w.stride + 1;  // rows or panels
    const int64_t first_row = n_before * (panels ? cpu::kPanelRows : 1);
    const SparseMemory room((n_before + kRows) * w.stride);
    ASSERT_TRUE(room.exists());
    t_.pack({stored.q.row_data(0), room.data(), w.type, first_row, kRows, kCols});
    cpu::Weight large = w;
    large.data = room.data();
    for (const cpu::ActivationType type : activations(t_, dtype)) {
      const Rows x(t_, type, normal(kMaxRows * kCols), kMaxRows, kCols, kCols);
      for (const auto& [m, n] : {std::pair{1, 64}, {1, kRows}, {kMaxRows, kRows}}) {
        std::vector<float> want(m * n, kNaN), got(m * n, kNaN);
        t_.gemm({x.view, w, 0, want.data(), n, m, n, kCols});
        t_.gemm({x.view, large, first_row, got.data(), n, m, n, kCols});
        EXPECT_EQ(got, want) << name_of(dtype) << " " << m << "x" << n;
      }
    }
    const std::vector<float> x = normal(kRows);
    const cpu::Activations rows = {x.data(), kRows * 4, cpu::ActivationType::kF32};
    std::vector<float> want(kCols, kNaN), got(kCols, kNaN);
    t_.gemm_transposed({rows, w, 0, want.data(), kCols, 1, kRows, kCols});
    t_.gemm_transposed({rows, large, first_row, got.data(), kCols, 1, kRows, kCols});
    EXPECT_EQ(got, want) << name_of(dtype) << " transposed";
  }
}

TEST_P(KernelTest, DecodesEveryCode) {
  std::vector<uint8_t> codes;
  for (int c = 0; c < 256; ++c)
    if ((c & 0x7f) != 0x7f) codes.push_back(static_cast<uint8_t>(c));
  std::vector<float> out(codes.size() + 1, kNaN);
  t_.decode(
      {codes.data(), cpu::WeightType::kF8E4M3, out.data(), static_cast<int64_t>(codes.size())});
  double sum = 0;
  for (size_t i = 0; i < codes.size(); ++i) {
    EXPECT_EQ(out[i], e4m3(codes[i])) << int{codes[i]};
    EXPECT_EQ(std::signbit(out[i]), codes[i] >> 7);
    if (codes[i] < 0x80) sum += out[i];
  }
  EXPECT_EQ(sum, 5407.875);  // codes 00 to 7E
  EXPECT_TRUE(std::isnan(out.back()));

  std::vector<uint16_t> all(65536);
  std::iota(all.begin(), all.end(), 0);
  std::vector<float> wide(all.size());
  // A number of so many exponent and mantissa bits, with infinities and NaN, from its definition.
  const auto ieee = [](int code, int n_exponent, int n_mantissa) {
    const int top = (1 << n_exponent) - 1, exponent = code >> n_mantissa & top;
    const double fraction = (code & ((1 << n_mantissa) - 1)) * std::pow(0.5, n_mantissa);
    const double sign = code & 0x8000 ? -1 : 1;
    if (exponent == top) return fraction > 0 ? std::nan("") : sign * HUGE_VAL;
    const double lead = exponent > 0 ? 1 : 0;
    return sign * (lead + fraction) * std::pow(2.0, std::max(exponent, 1) - top / 2);
  };
  for (const auto& [type, n_exponent, n_mantissa] :
       {std::tuple{cpu::WeightType::kF16, 5, 10}, {cpu::WeightType::kBF16, 8, 7}}) {
    t_.decode({all.data(), type, wide.data(), static_cast<int64_t>(all.size())});
    for (int c = 0; c < 65536; ++c) {
      const double want = ieee(c, n_exponent, n_mantissa);
      if (std::isnan(want)) {
        ASSERT_TRUE(std::isnan(wide[c])) << c;
      } else {
        ASSERT_EQ(wide[c], want) << c;
        ASSERT_EQ(std::signbit(wide[c]), c >> 15) << c;
      }
    }
  }
  if (t_.isa != cpu::Isa::kReference) return;  // the loader refuses E4M3's NaN
  const uint8_t no_numbers[] = {0x7f, 0xff};
  t_.decode({no_numbers, cpu::WeightType::kF8E4M3, out.data(), 2});
  EXPECT_TRUE(std::isnan(out[0]) && std::isnan(out[1]));
}

TEST_P(KernelTest, RmsNorm) {
  const float x[] = {1, -2, 3, -4}, gain[] = {.5f, 1, 1.5f, 2};
  float out[5] = {kNaN, kNaN, kNaN, kNaN, kNaN};
  t_.rms_norm({x, gain, out, 4, 1e-6f});
  expect_close(std::span(out, 4), std::vector{0.182574174, -0.730296695, 1.643167563, -2.921186779},
               1e-6);
  EXPECT_TRUE(std::isnan(out[4]));
  for (const int n : {1, 7, 8, 513, 7168}) {
    const std::vector<float> row = normal(n, 3), g = normal(n);
    std::vector<float> y(n, kNaN);
    t_.rms_norm({row.data(), g.data(), y.data(), n, 1e-5f});
    double mean = 0;
    for (const float v : row) mean += double{v} * v / n;
    std::vector<double> want, bound;
    for (int i = 0; i < n; ++i) {
      want.push_back(row[i] / std::sqrt(mean + 1e-5) * g[i]);
      bound.push_back((4 * std::sqrt(n) + 4) * kEps * std::fabs(want[i]) + 1e-30);
    }
    expect_close(y, want, bound);
  }
}

TEST_P(KernelTest, SiluMul) {
  std::vector<float> gate, up;
  for (float g = -100; g <= 100; g += 0.37f) gate.push_back(g), up.push_back(1 + g / 300);
  for (const size_t n : {size_t{1}, size_t{8}, size_t{13}, gate.size()}) {
    std::vector<float> out(gate.begin(), gate.begin() + n);
    t_.silu_mul({out.data(), up.data(), out.data(), static_cast<int64_t>(n)});
    for (size_t i = 0; i < n; ++i) {
      const double want = gate[i] / (1 + std::exp(-double{gate[i]})) * up[i];
      ASSERT_NEAR(out[i], want, 1e-6 * std::fabs(want) + 1e-35) << gate[i];
    }
  }
}

// Numbers in a type that attention reads, and their values after rounding.
struct Numbers {
  std::vector<float> values;
  std::vector<uint16_t> encoded;

  Numbers(std::vector<float> v, cpu::ActivationType type) : values(std::move(v)) {
    if (type == cpu::ActivationType::kF32) return;
    for (float& x : values) {
      encoded.push_back(std::isnan(x) ? 0x7fff : to_bf16(x));
      x = std::bit_cast<float>(uint32_t{encoded.back()} << 16);
    }
  }
  const void* at(size_t i) const {
    if (encoded.empty()) return values.data() + i;
    return encoded.data() + i;
  }
};

// Several blocks of keys and queries of several tokens; invisible keys are NaN. BF16 weights have
// errors of up to 2^-9 each.
TEST_P(KernelTest, AttendMatchesSoftmaxInDouble) {
  struct Case {
    int queries, per_token, keys, dim, rope, v_dim;
    int of_block = cpu::kMaxKeys;
  };
  for (const cpu::ActivationType type : {cpu::ActivationType::kF32, cpu::ActivationType::kBF16}) {
    const int bytes = type == cpu::ActivationType::kF32 ? 4 : 2;
    for (const Case& c :
         {Case{5, 5, 130, 40, 8, 40}, Case{12, 4, 64, 128, 64, 128}, Case{7, 1, 100, 20, 8, 12},
          Case{1, 1, 1, 512, 64, 512}, Case{2, 2, 63, 3, 2, 5}, Case{77, 7, 200, 32, 16, 80},
          Case{150, 30, 333, 96, 32, 100}, Case{40, 1, 129, 64, 32, 16},
          Case{300, 128, 70, 64, 32, 96}, Case{16, 1, 31, 64, 32, 32}, Case{9, 3, 40, 48, 32, 48},
          Case{20, 5, 150, 64, 16, 64, 40}}) {
      const int tokens = (c.queries + c.per_token - 1) / c.per_token;
      const auto with_nan = [&](int dim) {
        std::vector<float> v = normal((c.keys + tokens) * dim);
        std::fill(v.begin() + (c.keys + tokens - 1) * dim, v.end(), kNaN);
        return Numbers(v, type);
      };
      // Kernels that multiply in BF16 round the queries too.
      const bool rounds = type == cpu::ActivationType::kBF16 && t_.attention == type;
      const Numbers q(normal(c.queries * c.dim), rounds ? type : cpu::ActivationType::kF32);
      const Numbers q_rope(normal(c.queries * c.rope), rounds ? type : cpu::ActivationType::kF32);
      const Numbers k = with_nan(c.dim), k_rope = with_nan(c.rope), v = with_nan(c.v_dim);
      const int n_keys = c.keys + tokens - 1;  // token t sees keys + t keys
      const float scale = 0.7f / std::sqrt(static_cast<float>(c.dim));
      std::vector<float> out(c.queries * c.v_dim, 0.f),
          max(c.queries, -std::numeric_limits<float>::infinity()), sum(c.queries, 0.f);
      std::vector<cpu::KeyBlock> blocks;
      for (int first = 0; first < n_keys; first += c.of_block)
        blocks.push_back({k.at(first * c.dim), k_rope.at(first * c.rope), v.at(first * c.v_dim),
                          std::min(c.of_block, n_keys - first), c.keys - first});
      // Two calls test that the running softmax continues.
      const int half = static_cast<int>(blocks.size()) / 2;
      for (const auto& [first, n] :
           {std::pair{0, half}, {half, static_cast<int>(blocks.size()) - half}})
        t_.attend({.type = type,
                   .q = q.values.data(),
                   .q_rope = q_rope.values.data(),
                   .q_stride = c.dim,
                   .q_rope_stride = c.rope,
                   .blocks = blocks.data() + first,
                   .n_blocks = n,
                   .k_stride = c.dim * bytes,
                   .k_rope_stride = c.rope * bytes,
                   .v_stride = c.v_dim * bytes,
                   .n_queries = c.queries,
                   .dim = c.dim,
                   .rope_dim = c.rope,
                   .v_dim = c.v_dim,
                   .first_query = 0,
                   .queries_per_token = c.per_token,
                   .scale = scale,
                   .out = out.data(),
                   .out_stride = c.v_dim,
                   .max = max.data(),
                   .sum = sum.data()});
      for (int i = 0; i < c.queries; ++i) {
        const int seen = c.keys + i / c.per_token;
        std::vector<double> p(seen);
        double total = 0;
        for (int j = 0; j < seen; ++j) {
          double score = 0;
          for (int d = 0; d < c.dim; ++d)
            score += double{q.values[i * c.dim + d]} * k.values[j * c.dim + d];
          for (int d = 0; d < c.rope; ++d)
            score += double{q_rope.values[i * c.rope + d]} * k_rope.values[j * c.rope + d];
          total += p[j] = std::exp(score * scale);
        }
        std::vector<double> want(c.v_dim), bound(c.v_dim, 3e-5);
        for (int j = 0; j < seen; ++j)
          for (int d = 0; d < c.v_dim; ++d) {
            const double part = p[j] / total * v.values[j * c.v_dim + d];
            want[d] += part;
            if (rounds) bound[d] += 0x1p-9 * std::fabs(part);
          }
        std::vector<float> got(out.begin() + i * c.v_dim, out.begin() + (i + 1) * c.v_dim);
        for (float& g : got) g /= sum[i];
        expect_close(got, want, bound);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, KernelTest, testing::ValuesIn(all_tables()),
                         [](const auto& table) { return table.param.name; });

// Each instruction set and each extension replaces products of the previous one.
// The features that Linux lists. It lists AMX where the processor has it, also where it may not be
// used.
TEST(KernelTables, FeaturesAreThoseOfTheProcessor) {
  std::ifstream file("/proc/cpuinfo");
  std::set<std::string> flags;
  for (std::string line; flags.empty() && std::getline(file, line);) {
    if (!line.starts_with("flags")) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    for (std::string word; words >> word;) flags.insert(word);
  }
  if (flags.empty()) GTEST_SKIP() << "no flags in /proc/cpuinfo";
  const auto has = [&](std::initializer_list<const char*> all) {
    return std::all_of(all.begin(), all.end(), [&](const char* f) { return flags.contains(f); });
  };
  using cpu::Feature;
  EXPECT_TRUE(cpu::cpu_has(Feature::kBaseline));
  const bool avx2 = has({"avx2", "fma"}), avx512 = has({"avx512f", "avx512bw"});
  const bool vnni = avx512 && has({"avx512_vnni"}), bf16 = avx512 && has({"avx512_bf16"});
  EXPECT_EQ(cpu::cpu_has(Feature::kAvx2), avx2);
  EXPECT_EQ(cpu::cpu_has(Feature::kAvxVnni), avx2 && has({"avx_vnni"}));
  EXPECT_EQ(cpu::cpu_has(Feature::kAvx512), avx512);
  EXPECT_EQ(cpu::cpu_has(Feature::kAvx512Vnni), vnni);
  EXPECT_EQ(cpu::cpu_has(Feature::kAvx512Bf16), bf16);
  EXPECT_LE(cpu::cpu_has(Feature::kAmxBf16), has({"amx_bf16"}));
  EXPECT_LE(cpu::cpu_has(Feature::kAmxInt8), has({"amx_int8"}));
  EXPECT_EQ(cpu::extensions_here().avx_vnni, cpu::cpu_has(Feature::kAvxVnni));
  EXPECT_EQ(cpu::extensions_here().avx512_bf16, bf16);
  const bool tiles = cpu::cpu_has(Feature::kAmxBf16) && cpu::cpu_has(Feature::kAmxInt8);
  const bool modern = vnni && has({"avx512vl", "avx512dq", "avx512vbmi"});
  EXPECT_EQ(cpu::best_isa(), modern && tiles && bf16 && has({"gfni"}) ? cpu::Isa::kAmx
                             : modern                                 ? cpu::Isa::kAvx512
                             : avx2                                   ? cpu::Isa::kAvx2
                                                                      : cpu::Isa::kReference);
}

// Every page of the range is read, and nothing behind it, where memory ends.
TEST(SpeedLoops, ReadTheWholeRange) {
  constexpr int64_t kPages = 24, kBytes = kPages * cpu::kReadBlock;
  const int pagemap = open("/proc/self/pagemap", O_RDONLY);
  int n_loops = 0;
  for (int island = 0; island < cpu::kNumSpeedLoops; ++island) {
    const cpu::SpeedLoops loops = cpu::speed_loops(island);
    for (int i = 0; i < loops.n_reads; ++i) {
      if (!cpu::cpu_has(loops.reads[i].needs)) continue;
      SCOPED_TRACE(loops.reads[i].name);
      ++n_loops;
      auto* const memory = static_cast<std::byte*>(
          mmap(nullptr, kBytes + 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
      madvise(memory, kBytes, MADV_NOHUGEPAGE);
      mprotect(memory + kBytes, 4096, PROT_NONE);
      loops.reads[i].run(memory, kBytes);
      for (int64_t page = 0; page < kPages; ++page) {
        uint64_t entry = 0;
        const auto at =
            static_cast<off_t>((reinterpret_cast<uintptr_t>(memory) / 4096 + page) * sizeof entry);
        if (pread(pagemap, &entry, sizeof entry, at) != sizeof entry) break;  // not permitted
        EXPECT_TRUE(entry >> 63) << "page " << page;
      }
      munmap(memory, kBytes + 4096);
    }
  }
  close(pagemap);
  EXPECT_GE(n_loops, 1);
}

// Four times as many rounds take about four times as long.
TEST(SpeedLoops, TakeTimeInProportionToTheirRounds) {
  for (int island = 0; island < cpu::kNumSpeedLoops; ++island) {
    const cpu::SpeedLoops loops = cpu::speed_loops(island);
    for (int i = 0; i < loops.n_peaks; ++i) {
      const cpu::PeakLoop& loop = loops.peaks[i];
      if (!cpu::cpu_has(loop.needs)) continue;
      EXPECT_GT(loop.ops_per_round, 0) << loop.instruction;
      const auto seconds = [&](int64_t n) {
        const auto start = std::chrono::steady_clock::now();
        loop.run(n);
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      };
      double few = 1, many = 1, ratio = 0;
      for (int turn = 0; turn < 10 || (turn < 200 && (ratio <= 1.5 || ratio >= 20)); ++turn) {
        few = std::min(few, seconds(10'000));
        many = std::min(many, seconds(40'000));
        ratio = many / few;
      }
      EXPECT_GT(ratio, 1.5) << loop.instruction;  // other programs may run beside it
      EXPECT_LT(ratio, 20) << loop.instruction;
    }
  }
}

TEST(KernelTables, ExtensionsReplaceProducts) {
  const auto differ = [](const cpu::KernelTable& a, const cpu::KernelTable& b) {
    return a.gemm != b.gemm;
  };
  const cpu::KernelTable avx2 = cpu::table_of(cpu::Isa::kAvx2, {}),
                         avx512 = cpu::table_of(cpu::Isa::kAvx512, {});
  EXPECT_TRUE(differ(avx2, cpu::table_of(cpu::Isa::kReference, {})));
  EXPECT_TRUE(differ(avx2, cpu::table_of(cpu::Isa::kAvx2, {.avx_vnni = true})));
  EXPECT_TRUE(differ(avx512, avx2));
  EXPECT_TRUE(differ(avx512, cpu::table_of(cpu::Isa::kAvx512, {.avx512_bf16 = true})));
  EXPECT_TRUE(differ(avx512, cpu::table_of(cpu::Isa::kAmx, {.avx512_bf16 = true})));
}

TEST(KernelTable, EachIsaHasItsOwnProducts) {
  const cpu::KernelTable reference = cpu::kernels_for(cpu::Isa::kReference);
  EXPECT_STREQ(reference.name, "reference");
  if (cpu::best_isa() < cpu::Isa::kAvx2) GTEST_SKIP() << "this CPU has no AVX2";
  const cpu::KernelTable avx2 = cpu::kernels_for(cpu::Isa::kAvx2);
  EXPECT_STREQ(avx2.name, "avx2");
  EXPECT_NE(avx2.gemm, reference.gemm);
  EXPECT_NE(avx2.attend, reference.attend);
  if (cpu::best_isa() < cpu::Isa::kAvx512) GTEST_SKIP() << "this CPU has no AVX-512";
  const cpu::KernelTable avx512 = cpu::kernels_for(cpu::Isa::kAvx512);
  EXPECT_STREQ(avx512.name, "avx512");
  EXPECT_NE(avx512.gemm, avx2.gemm);
  const cpu::KernelTable amx = cpu::table_of(cpu::Isa::kAmx, {.avx512_bf16 = true});
  EXPECT_STREQ(amx.name, "amx");
  EXPECT_NE(amx.gemm, avx512.gemm);
  EXPECT_NE(amx.attend, avx512.attend);
}

}  // namespace
}  // namespace tandem::test
