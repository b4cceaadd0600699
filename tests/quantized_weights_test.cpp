// Weights converted at load: the decoded codes against the original numbers, and products of codes
// against products of the decoded numbers, in double precision.
#include <limits>
#include <optional>
#include <random>

#include "tests/check_close.h"
#include "tests/error_of.h"
#include "tests/kernel_tables.h"
#include "tests/random_model.h"
#include "tests/stored_numbers.h"

namespace tandem::test {
namespace {

struct Case {
  WeightFormat format;
  double step;  // largest error in units of the scale; for FP8 relative
};
constexpr Case kCases[] = {
    {{DType::kI8}, 0.5001},         {{DType::kI4, 32}, 1.3},       {{DType::kI4, 64}, 1.3},
    {{DType::kI4, 128}, 1.3},       {{DType::kI4TwoLevel, 32}, 2}, {{DType::kI4TwoLevel, 64}, 2},
    {{DType::kI4TwoLevel, 128}, 2}, {{DType::kF8E4M3, 128}, 0.07}, {{DType::kBF16}, 0.004}};

struct Converted {
  CpuWeights home;
  QuantView w;

  Converted(const cpu::KernelTable& t, const QuantView& stored, WeightFormat format) : home(t) {
    home.allocate(home.converted_bytes(stored, format));
    w = home.reserve_converted(stored, format);
    const int64_t half = std::min<int64_t>(16, stored.q.rows);
    home.convert(stored.q.row_data(0), stored, w, 0, half);
    if (half < stored.q.rows)
      home.convert(stored.q.row_data(half), stored, w, half, stored.q.rows - half);
  }
};

// Packed INT4 as stored in the checkpoint.
struct Packed {
  CpuWeights home;
  QuantView w;

  Packed(const cpu::KernelTable& t, const QuantView& stored) : home(t) {
    home.allocate(home.packed_bytes(stored));
    w = home.reserve(stored);
    home.pack_words_scales(stored.scale.data, w);
    const int64_t half = std::min<int64_t>(16, stored.q.rows);
    home.pack_words(stored.q.row_data(0), w, 0, half);
    if (half < stored.q.rows)
      home.pack_words(stored.q.row_data(half), w, half, stored.q.rows - half);
  }
};

// The decoded number of a converted matrix in row-major layout.
double value_of(const QuantView& w, int64_t r, int64_t c) {
  const auto* codes = reinterpret_cast<const uint8_t*>(w.q.row_data(r));
  if (w.scale.empty()) return value(w, r, c);
  const double scale = w.scale.row<float>(r)[c / w.block_cols];
  if (w.q.dtype == DType::kF8E4M3) return scale * e4m3(codes[c]);
  if (w.q.dtype == DType::kI8) return scale * static_cast<int8_t>(codes[c]);
  const int pair = codes[c / 8 * 4 + c % 4];
  const int code = c % 8 < 4 ? pair & 15 : pair >> 4;
  return scale * (code < 8 ? code : code - 16);
}

RandomModel random_model(DType dtype) {
  ModelConfig c;
  c.n_layers = c.vocab = c.dim = 0;
  c.scale_block = 16;  // parts that are converted separately have separate scales
  return RandomModel(c, dtype);
}

const cpu::KernelTable kReference = cpu::kernels_for(cpu::Isa::kReference);

// The part of w from row 5, column 24 on, which begins within a 16 x 16 scale block.
QuantView part_of(RandomModel& store, const QuantView& w) {
  QuantView part = w;
  part.q = store.room(w.q.rows - 5, w.q.cols - 24, w.q.dtype);
  for (int64_t r = 0; r < part.q.rows; ++r)
    std::memcpy(part.q.row_data(r), w.q.row_data(r + 5) + 24, part.q.cols);
  part.row0 = 5;
  part.col0 = 24;
  return part;
}

TEST(QuantizedWeights, APartIsConvertedWithItsOwnScales) {
  RandomModel store = random_model(DType::kF8E4M3);
  const QuantView whole = store.matrix(45, 152, DType::kF8E4M3);
  const QuantView stored = part_of(store, whole);
  const Converted converted(kReference, stored, {DType::kBF16});
  for (int r = 0; r < 40; ++r)
    for (int c = 0; c < 128; ++c)
      ASSERT_NEAR(value(converted.w, r, c), value(whole, r + 5, c + 24),
                  0.004 * std::fabs(value(whole, r + 5, c + 24)));
}

TEST(QuantizedWeights, CodesStandForTheStoredNumbers) {
  for (const DType stored_as : {DType::kF32, DType::kBF16, DType::kF8E4M3, DType::kI4Words}) {
    RandomModel store = random_model(stored_as);
    const QuantView stored = stored_as == DType::kI4Words ? store.int4_words(40, 384, 64)
                                                          : store.matrix(40, 384, stored_as);
    for (const Case& test : kCases) {
      const Converted converted(kReference, stored, test.format);
      const QuantView& w = converted.w;
      for (int r = 0; r < 40; ++r) {
        for (int c = 0; c < 384; ++c) {
          const double want = value(stored, r, c), got = value_of(w, r, c);
          const bool relative = test.format.dtype == DType::kF8E4M3 || w.scale.empty();
          const double scale = w.scale.empty() ? 0 : w.scale.row<float>(r)[c / w.block_cols];
          const double bound = relative ? test.step * std::fabs(want) + scale * 0x1p-9
                                        : test.step * std::fabs(scale);
          ASSERT_NEAR(got, want, bound) << name_of(test.format.dtype) << " " << r << "," << c;
        }
      }
    }
  }
}

TEST(QuantizedWeights, Int4UsesAllSixteenCodesAndZerosStayZero) {
  for (const DType dtype : {DType::kI4, DType::kI4TwoLevel}) {
    RandomModel store = random_model(DType::kF32);
    QuantView stored = store.matrix(16, 256, DType::kF32);
    std::memset(stored.q.row_data(3), 0, 256 * 4);
    std::memset(stored.q.row_data(4), 0, 32 * 4);
    const Converted converted(kReference, stored, {dtype, 32});
    int used[16] = {};
    for (int r = 0; r < 16; ++r)
      for (int c = 0; c < 256; ++c) {
        const double v = value_of(converted.w, r, c);
        if (r == 3 || (r == 4 && c < 32)) {
          ASSERT_EQ(v, 0);
        } else {
          ++used[std::lrint(v / converted.w.scale.row<float>(r)[c / 32]) + 8];
        }
      }
    for (int code = 0; code < 16; ++code) EXPECT_GT(used[code], 0) << code - 8;
  }
}

// The scales of a row's groups differ by a factor of up to fifteen; smaller groups use the smallest
// multiplier. The kernels' layout has the same multiples as the reference layout.
TEST(QuantizedWeights, TwoLevelsScalesAreMultiplesOfTheRowsOwn) {
  RandomModel store = random_model(DType::kF32);
  QuantView stored = store.matrix(32, 512, DType::kF32);
  for (int r = 0; r < 32; ++r)
    for (int c = 0; c < 512; ++c)
      stored.q.row<float>(r)[c] *= std::ldexp(1.f, r % 2 ? 0 : -(c / 64));
  const Converted rows(kReference, stored, {DType::kI4TwoLevel, 64});
  for (const NamedTable& t : all_tables()) {
    if (t.kernels.layout != cpu::Layout::kPanels) continue;
    const Converted panels(t.kernels, stored, {DType::kI4TwoLevel, 64});
    for (int r = 0; r < 32; ++r) {
      const auto* of_four = reinterpret_cast<const int8_t*>(panels.w.scale.row<float>(0));
      const float own = panels.w.scale.row<float>(0)[8 * 64 / 4 + r];
      for (int g = 0; g < 8; ++g) {
        const int multiplier = of_four[g * 64 + r];
        ASSERT_EQ(rows.w.scale.row<float>(r)[g], own * static_cast<float>(multiplier));
        ASSERT_TRUE(multiplier != 0 && std::abs(multiplier) <= 15) << r << " group " << g;
        ASSERT_TRUE(r % 2 == 1 || g < 7 || std::abs(multiplier) == 1) << r;
      }
    }
  }
}

// Relative root mean square error of normally distributed numbers.
double error_as(WeightFormat format) {
  RandomModel store = random_model(DType::kF32);
  const QuantView stored = store.matrix(64, 2048, DType::kF32);
  const Converted converted(kReference, stored, format);
  double error = 0, all = 0;
  for (int r = 0; r < 64; ++r)
    for (int c = 0; c < 2048; ++c) {
      const double want = value(stored, r, c), off = value_of(converted.w, r, c) - want;
      error += off * off;
      all += want * want;
    }
  return std::sqrt(error / all);
}

TEST(QuantizedWeights, TwoLevelsLoseLessThanAScaleForEachGroup) {
  for (const int group : {32, 64, 128})
    EXPECT_LT(error_as({DType::kI4TwoLevel, group}), 0.992 * error_as({DType::kI4, group}))
        << group;
}

struct Shape {
  int m, n, k;
};
constexpr Shape kShapes[] = {
    {1, 16, 128}, {3, 70, 256}, {7, 33, 640}, {33, 64, 1024}, {300, 17, 128}};
constexpr int kSkip = 3;  // rows of a matrix that are not multiplied

// Compares products of random rows, or of rows of one number, and the rows of w from kSkip on with
// sums over value(row, column).
void expect_products(const NamedTable& table, const QuantView& w, Shape shape, std::mt19937& random,
                     const auto& value, std::optional<float> number_of_x = {}) {
  const cpu::KernelTable& t = table.kernels;
  const auto [m, n, k] = shape;
  const auto type = activation_for(t, w.q.dtype);
  std::vector<float> x(m * k), scales(m), out(m * n, std::nanf(""));
  std::normal_distribution<float> normal;
  // Rows have scales of their own, and are taken from the last to the first.
  for (int i = 0; i < m * k; ++i)
    x[i] = number_of_x.value_or(static_cast<float>(1 + i / k) * normal(random));
  std::vector<int32_t> order(m);
  for (int i = 0; i < m; ++i) order[i] = m - 1 - i;
  Buffer room(int64_t{m} * k * 2);
  cpu::Activations rows{x.data(), k * 4, type};
  std::vector<double> seen(x.begin(), x.end());
  if (type != cpu::ActivationType::kF32) {
    rows = {room.data(), k * 2, type, nullptr, scales.data()};
    for (int i = 0; i < m; ++i)
      t.encode({x.data() + i * k, k, type, room.data() + i * k * 2, &scales[i]});
  }
  for (int i = 0; i < m * k; ++i) {
    const std::byte* row = room.data() + i / k * k * 2;
    if (type == cpu::ActivationType::kBF16)
      seen[i] = std::bit_cast<float>(uint32_t{to_bf16(x[i])} << 16);
    if (type != cpu::ActivationType::kU8) continue;
    seen[i] = scales[i / k] * (static_cast<int>(row[i % k]) - 128);
    ASSERT_NEAR(seen[i], x[i], 0.5001 * scales[i / k]);
  }

  rows.rows = order.data();
  t.gemm({rows, kernel_weight(w), kSkip, out.data(), n, m, n, k});
  std::vector<double> want, bound;
  for (const int i : order) {
    for (int j = 0; j < n; ++j) {
      double sum = 0, magnitude = 0;
      for (int c = 0; c < k; ++c) {
        const double number = value(kSkip + j, c);
        sum += seen[i * k + c] * number;
        magnitude += (std::fabs(seen[i * k + c]) + 128 * scales[i]) * std::fabs(number);
      }
      want.push_back(sum);
      bound.push_back((4 * std::sqrt(k) + 2) * kEps * magnitude + 1e-30);
    }
  }
  SCOPED_TRACE(testing::Message() << table.name << " " << name_of(w.q.dtype) << " group "
                                  << w.block_cols << " " << m << "x" << n << "x" << k);
  expect_close(out, want, bound);
}

TEST(QuantizedWeights, ProductsOfEveryIsa) {
  for (const NamedTable& table : all_tables())
    for (const Case& test : kCases)
      for (const Shape& shape : kShapes) {
        RandomModel store = random_model(DType::kBF16);
        const QuantView stored = store.matrix(shape.n + kSkip, shape.k, DType::kBF16);
        const Converted plain(kReference, stored, test.format);
        const Converted packed(table.kernels, stored, test.format);
        expect_products(table, packed.w, shape, store.rng,
                        [&](int64_t r, int64_t c) { return value_of(plain.w, r, c); });
      }
}

// Codes of the largest magnitude everywhere: no sum in integers overflows or saturates.
TEST(QuantizedWeights, ProductsOfTheLargestCodes) {
  for (const NamedTable& table : all_tables())
    for (const Case& test : kCases)
      for (const float number : {-1.f, 1.f})
        for (const int m : {1, 7}) {
          RandomModel store = random_model(DType::kBF16);
          const QuantView stored = store.matrix(64 + kSkip, 1024, DType::kBF16);
          for (int64_t r = 0; r < stored.q.rows; ++r)
            std::fill_n(stored.q.row<uint16_t>(r), stored.q.cols, to_bf16(number));
          const Converted plain(kReference, stored, test.format);
          const Converted packed(table.kernels, stored, test.format);
          expect_products(
              table, packed.w, {m, 64, 1024}, store.rng,
              [&](int64_t r, int64_t c) { return value_of(plain.w, r, c); }, 1.f);
        }
}

TEST(QuantizedWeights, ProductsOfPackedInt4AsItIsStored) {
  for (const NamedTable& table : all_tables())
    for (const int group : {32, 64, 128})
      for (const Shape& shape : kShapes) {
        RandomModel store = random_model(DType::kBF16);
        const QuantView stored = store.int4_words(shape.n + kSkip, shape.k, group);
        const Packed packed(table.kernels, stored);
        EXPECT_EQ(packed.w.q.dtype, DType::kI4);
        expect_products(table, packed.w, shape, store.rng,
                        [&](int64_t r, int64_t c) { return value(stored, r, c); });
      }
}

TEST(QuantizedWeights, PackedInt4KeepsEveryNumber) {
  RandomModel store = random_model(DType::kBF16);
  const QuantView stored = store.int4_words(40, 384, 32);
  const Packed packed(kReference, stored);
  for (int r = 0; r < 40; ++r)
    for (int c = 0; c < 384; ++c) ASSERT_EQ(value_of(packed.w, r, c), value(stored, r, c));
}

TEST(QuantizedWeights, GroupsMustDivideTheColumns) {
  RandomModel store = random_model(DType::kBF16);
  const QuantView stored = store.matrix(16, 200, DType::kBF16);
  CpuWeights home(kReference);
  const auto refusal = [&](WeightFormat format) {
    return error_of([&] { home.reserve_converted(stored, format); });
  };
  EXPECT_EQ(
      refusal({DType::kI4, 64}),
      "groups of 64 numbers do not divide the 200 columns of a matrix: choose another format");
  EXPECT_EQ(refusal({DType::kI4, 25}),
            "groups of 25 numbers do not divide the 200 columns of a matrix: choose another format")
      << "no whole bytes";
  EXPECT_EQ(refusal({DType::kF32}),
            "weights stored as BF16 cannot be kept as F32: choose fp8, bf16, int8 or int4");
  QuantView in_blocks = store.matrix(16, 200, DType::kF8E4M3);
  in_blocks.block_cols = 6;
  home.allocate(home.packed_bytes(in_blocks));
  EXPECT_EQ(error_of([&] { home.reserve(in_blocks); }),
            "weights with scales for blocks of 6 columns: must be a multiple of 4");
}

// Sizes in proportion to the rows, also beyond 2^31 numbers and bytes.
TEST(QuantizedWeights, SizesGrowWithTheRows) {
  for (const cpu::Isa isa : {cpu::Isa::kReference, cpu::Isa::kAvx2}) {
    const cpu::KernelTable kernels = cpu::table_of(isa, {});
    const CpuWeights home(kernels);
    const auto matrix = [](int64_t rows, DType type) {
      return QuantView{.q = {nullptr, rows, 16384, 16384, type}, .scale = {}};
    };
    constexpr int64_t kFew = 1024, kTimes = 1024;
    for (const DType type : {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3}) {
      const int64_t few = home.packed_bytes(matrix(kFew, type));
      EXPECT_GE(few, kFew * 16384 * size_of(type));
      EXPECT_EQ(home.packed_bytes(matrix(kFew * kTimes, type)), few * kTimes) << name_of(type);
      EXPECT_EQ(CpuWeights::table_bytes(matrix(kFew * kTimes, type)),
                kFew * kTimes * 16384 * size_of(type));
    }
    for (const Case& c : kCases)
      EXPECT_EQ(home.converted_bytes(matrix(kFew * kTimes, DType::kBF16), c.format),
                home.converted_bytes(matrix(kFew, DType::kBF16), c.format) * kTimes)
          << name_of(c.format.dtype);
    // 1024 rows in panels of 16 have a scale and a sum for each row; for INT4 a BF16 scale or a
    // byte for each group, a row's own scale for the byte, and a sum.
    const auto converted = [&](WeightFormat format) {
      return home.converted_bytes(matrix(kFew, DType::kBF16), format);
    };
    const bool panels = isa != cpu::Isa::kReference;
    EXPECT_EQ(converted({DType::kBF16}), 1 << 25);
    EXPECT_EQ(converted({DType::kI8}), (1 << 24) + (panels ? 2 : 1) * 1024 * 4);
    EXPECT_EQ(converted({DType::kF8E4M3}), (1 << 24) + (panels ? 129 : 128) * 1024 * 4);
    EXPECT_EQ(converted({DType::kI4, 32}), (1 << 23) + (panels ? 512 * 2 + 4 : 512 * 4) * 1024);
    EXPECT_EQ(converted({DType::kI4TwoLevel, 64}),
              (1 << 23) + (panels ? 256 + 4 + 4 : 256 * 4) * 1024);
    EXPECT_EQ(CpuWeights::vector_bytes(
                  {.q = {nullptr, 1, int64_t{1} << 30, 0, DType::kBF16}, .scale = {}}),
              int64_t{1} << 32);
  }
}

}  // namespace
}  // namespace tandem::test
