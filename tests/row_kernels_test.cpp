// Kernels for rows that travel between ranks, of every instruction set: the bits of each are those
// of the scalar reference, which is compared with the definition of the format.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <span>

#include "tests/kernel_cases.h"
#include "tests/kernel_tables.h"

namespace tandem::test {
namespace {

constexpr int kBlock = cpu::kScaledColumns;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
const cpu::KernelTable kScalar = cpu::table_of(cpu::Isa::kReference, {});

class RowKernels : public testing::TestWithParam<NamedTable> {
 protected:
  const cpu::KernelTable& t_ = GetParam().kernels;
  std::mt19937 rng_{1};
};

// A row of FP8, with memory behind it that must stay.
struct Fp8Row {
  explicit Fp8Row(int64_t n) : codes(n + 64, 0xa5), scales((n + kBlock - 1) / kBlock + 1, -7) {}
  Fp8Row(const cpu::KernelTable& t, const std::vector<float>& x) : Fp8Row(std::ssize(x)) {
    t.encode_fp8({x.data(), codes.data(), scales.data(), std::ssize(x)});
  }
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};

uint32_t bits(float v) { return std::bit_cast<uint32_t>(v); }

// NaN may have any bits.
bool same(float a, float b) { return bits(a) == bits(b) || (std::isnan(a) && std::isnan(b)); }

void expect_same(std::span<const float> got, std::span<const float> want, const char* what) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i)
    ASSERT_TRUE(same(got[i], want[i])) << what << " " << i << ": " << got[i] << " " << want[i];
}

void expect_same(const Fp8Row& got, const Fp8Row& want) {
  expect_same(got.scales, want.scales, "scale");
  for (size_t i = 0; i < want.codes.size(); ++i)
    ASSERT_EQ(int{got.codes[i]}, int{want.codes[i]}) << "code " << i;
}

// Upper halves of floats with lower halves around the middle: every exponent, and every way in
// which digits that are dropped lie to the middle.
constexpr uint32_t kLowerHalves[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};

// The code of the nearest number, the even one of two.
int nearest_code(double size) {
  int best = 0;
  for (int code = 1; code < 0x7f; ++code) {
    const double d = std::fabs(e4m3(static_cast<uint8_t>(code)) - size);
    const double b = std::fabs(e4m3(static_cast<uint8_t>(best)) - size);
    if (d < b || (d == b && code % 2 == 0)) best = code;
  }
  return best;
}

// The scale of blocks with 448 is 1.
TEST_P(RowKernels, EncodesFp8ToTheNearestCode) {
  std::vector<float> x;
  std::vector<int> want;
  int code = 0;
  for (uint32_t upper = 0; upper <= 0x43e0; ++upper) {
    for (const uint32_t lower : kLowerHalves) {
      const float size = std::bit_cast<float>(upper << 16 | lower);
      if (size > 448) continue;
      // Codes grow with numbers, so few have to be compared.
      const float middle = (e4m3(static_cast<uint8_t>(code)) +
                            e4m3(static_cast<uint8_t>(std::min(code + 1, 0x7e)))) /
                           2;
      if (size > middle || (size == middle && code % 2 == 1)) code = nearest_code(size);
      for (const float sign : {1.f, -1.f}) {
        if (x.size() % kBlock == 0) {
          x.push_back(448);
          want.push_back(0x7e);
        }
        x.push_back(std::copysign(size, sign));
        want.push_back(sign < 0 ? code | 0x80 : code);
      }
    }
  }
  ASSERT_GT(x.size(), 200'000u);
  const Fp8Row row(t_, x);
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(int{row.codes[i]}, want[i]) << x[i] << " at " << i;
    ASSERT_EQ(row.scales[i / kBlock], 1);
  }
  EXPECT_EQ(row.codes[x.size()], 0xa5) << "wrote past the codes";
  EXPECT_EQ(row.scales.back(), -7) << "wrote past the scales";
}

// Blocks of every exponent, whose numbers are up to 2^20 times smaller than the largest; numbers
// that are so small that 448 / largest is infinite, zeros of both signs, infinities and NaN.
TEST_P(RowKernels, EncodesFp8AsTheReference) {
  for (const int64_t n : {1, 5, 127, 128, 129, 300, 7168}) {
    for (int exponent = -149; exponent < 128; exponent += n == 300 ? 1 : 23) {
      std::vector<float> x(n);
      for (float& v : x) {
        const double size =
            std::ldexp(1 + rng_() * 0x1p-32, exponent - static_cast<int>(rng_() % 21));
        v = static_cast<float>(rng_() % 2 ? size : -size);
        if (rng_() % 16 == 0) v = rng_() % 2 ? 0.f : -0.f;
      }
      if (exponent % 3 == 0 && n > 5) {
        constexpr float kSpecial[] = {kNaN, kInfinity, -kInfinity};
        x[rng_() % n] = kSpecial[rng_() % 3];
        x[n - 1 - rng_() % 3] = std::copysign(kSpecial[rng_() % 3], rng_() % 2 ? 1.f : -1.f);
      }
      SCOPED_TRACE(testing::Message() << n << " columns of 2^" << exponent);
      expect_same(Fp8Row(t_, x), Fp8Row(kScalar, x));
    }
  }
}

// The scale follows from the number with the largest size wherever it stands.
TEST_P(RowKernels, TheLargestNumberOfABlockBecomes448) {
  for (const int n : {128, 40})
    for (int largest = 0; largest < n; ++largest)
      for (const float sign : {1.f, -1.f}) {
        std::vector<float> x(kBlock + n, 1.f);
        x[kBlock + largest] = 7 * sign;
        const Fp8Row row(t_, x);
        EXPECT_EQ(row.scales[0], 1 / 448.f);
        ASSERT_EQ(row.scales[1], 7 / 448.f) << largest;
        ASSERT_EQ(row.codes[kBlock + largest], sign < 0 ? 0xfe : 0x7e) << largest;
      }
}

// Every code that encoding makes with scales of every exponent, also 0, infinity and NaN.
TEST_P(RowKernels, DecodesFp8AsTheReference) {
  std::vector<uint8_t> codes;
  for (int c = 0; c < 256; ++c)
    if ((c & 0x7f) != 0x7f) codes.push_back(static_cast<uint8_t>(c));
  for (const int64_t n : {1, 31, 128, 130, 254, 640}) {
    std::vector<uint8_t> row(n);
    std::vector<float> scales((n + kBlock - 1) / kBlock), got(n + 1, -7.f), want(n + 1, -7.f);
    for (int exponent = -150; exponent < 120; ++exponent) {
      for (int64_t i = 0; i < n; ++i) row[i] = codes[(i + exponent + 150) % codes.size()];
      for (float& s : scales) s = static_cast<float>(std::ldexp(1 + rng_() * 0x1p-32, exponent));
      if (exponent == 0) scales.back() = kNaN;
      if (exponent == 1) scales.back() = kInfinity;
      if (exponent == 2) scales.back() = 0;
      t_.decode_fp8({row.data(), scales.data(), got.data(), n});
      kScalar.decode_fp8({row.data(), scales.data(), want.data(), n});
      SCOPED_TRACE(testing::Message() << n << " columns, scales of 2^" << exponent);
      expect_same(got, want, "column");
    }
  }
}

TEST_P(RowKernels, EncodesEveryUpperHalfToBf16) {
  std::vector<float> x;
  for (uint32_t upper = 0; upper < 0x10000; ++upper)
    for (const uint32_t lower : kLowerHalves)
      x.push_back(std::bit_cast<float>(upper << 16 | lower));
  std::vector<uint16_t> got(x.size() + 1, 0xabcd);
  t_.encode_bf16({x.data(), got.data(), std::ssize(x)});
  for (size_t i = 0; i < x.size(); ++i) {
    const uint32_t upper = bits(x[i]) >> 16, lower = bits(x[i]) & 0xffff;
    const bool up = lower > 0x8000 || (lower == 0x8000 && upper % 2 == 1);
    const uint32_t want = std::isnan(x[i]) ? upper | 0x40 : upper + up;
    ASSERT_EQ(got[i], want) << std::hex << bits(x[i]);
  }
  EXPECT_EQ(got.back(), 0xabcd) << "wrote past the row";
  // NaN in each lane, beside numbers; rounding would make it 0.
  for (int64_t n = 1; n < 40; ++n)
    for (int64_t nan = 0; nan < n; ++nan) {
      std::vector<float> row(n, 1.5f);
      row[nan] = std::bit_cast<float>(0xffffffffu);
      std::vector<uint16_t> out(n + 1, 0xabcd), want(n + 1, 0x3fc0);
      want[nan] = 0xffff;
      want[n] = 0xabcd;
      t_.encode_bf16({row.data(), out.data(), n});
      ASSERT_EQ(out, want) << n << " columns, NaN in " << nan;
    }
}

// Sums of zero to nine rows: they depend on the order of the rows, and on products that are
// rounded.
TEST_P(RowKernels, AddsRowsAsTheReference) {
  for (const auto type : {cpu::ActivationType::kF32, cpu::ActivationType::kBF16})
    for (const int64_t n : {1, 7, 8, 15, 31, 63, 64, 65, 300, 7168})
      for (int n_rows = 0; n_rows < 10; ++n_rows) {
        std::vector<float> numbers = normal(rng_, n_rows * n + 1);
        for (float& v : numbers) {
          if (rng_() % 64 == 0) v = -0.f;
          if (rng_() % 64 == 0) v = 1e-40f;
          if (rng_() % 512 == 0) v = rng_() % 2 ? kInfinity : kNaN;
        }
        std::vector<cpu::bf16> rounded(numbers.size());
        kScalar.encode_bf16({numbers.data(), rounded.data(), std::ssize(numbers)});
        std::vector<cpu::WeightedRow> rows;
        for (int r = 0; r < n_rows; ++r) {
          const void* const row = type == cpu::ActivationType::kBF16
                                      ? static_cast<const void*>(&rounded[r * n])
                                      : &numbers[r * n];
          rows.push_back({row, n_rows == 2 ? 1 : std::normal_distribution<float>()(rng_)});
        }
        std::vector<float> got = normal(rng_, n + 1);
        for (float& v : got)
          if (rng_() % 8 == 0) v = -0.f;
        std::vector<float> want = got;
        t_.add_rows({rows.data(), n_rows, type, got.data(), n});
        kScalar.add_rows({rows.data(), n_rows, type, want.data(), n});
        SCOPED_TRACE(testing::Message() << n_rows << " rows of " << n);
        expect_same(got, want, "column");
        EXPECT_EQ(bits(got.back()), bits(want.back()));
      }
}

// The reference itself, against numbers that were worked out by hand.
TEST_P(RowKernels, AddsRowsInTheirOrder) {
  const float large[] = {0x1p24f, -0.f}, one[] = {1, -0.f}, minus[] = {-0x1p24f, -0.f};
  const auto sum_of = [&](const std::vector<cpu::WeightedRow>& rows) {
    std::vector<float> out = {0.5f, -0.f};
    t_.add_rows(
        {rows.data(), static_cast<int>(rows.size()), cpu::ActivationType::kF32, out.data(), 2});
    EXPECT_FALSE(std::signbit(out[1])) << "sums begin with 0";
    return out[0];
  };
  EXPECT_EQ(sum_of({{large, 1}, {one, 1}, {minus, 1}}), 0.5f);  // 2^24 + 1 is 2^24
  EXPECT_EQ(sum_of({{large, 1}, {minus, 1}, {one, 3}}), 3.5f);
  EXPECT_EQ(sum_of({}), 0.5f);
}

INSTANTIATE_TEST_SUITE_P(Isas, RowKernels, testing::ValuesIn(all_tables()),
                         [](const auto& table) { return table.param.name; });

}  // namespace
}  // namespace tandem::test
