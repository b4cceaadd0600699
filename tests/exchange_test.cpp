// Expert exchanges between threads, and the formats in which rows travel: every code by brute
// force.
#include "comm/alone.h"
#include "comm/local_ranks.h"
#include "tests/exchange_cases.h"

namespace tandem::test {
namespace {

// 300 columns are no multiple of a block with one scale, 7 none of anything.
TEST(Exchange, EveryModeAndFormat) {
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  for (const int n : {1, 2, 3, 4, 8})
    run_local_ranks({n}, [&](Group& group) {
      HostGroups groups(group, HostLayout::one_host(n));
      for (const ExchangeKind& kind : exchange_kinds())
        check_exchange(groups, kernels, kind, n == 3 ? 7 : 300, n == 8 ? 6 : 12);
    });
}

TEST(Exchange, OneRankAlone) {
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  const auto alone = make_alone();
  HostGroups groups(*alone, HostLayout::one_host(1));
  for (const ExchangeKind& kind : exchange_kinds()) check_exchange(groups, kernels, kind, 256, 6);
}

TEST(RowCodec, BytesOfARow) {
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::Isa::kReference);
  const auto bytes = [&](RowFormat format, int dim) {
    return RowCodec(kernels, format, dim).bytes();
  };
  EXPECT_EQ(bytes(RowFormat::kF32, 7168), 28672);
  EXPECT_EQ(bytes(RowFormat::kBf16, 7168), 14336);
  EXPECT_EQ(bytes(RowFormat::kFp8, 7168), 7392);
  EXPECT_EQ(bytes(RowFormat::kBf16, 7), 16);
  EXPECT_EQ(bytes(RowFormat::kFp8, 129), 132 + 8);
}

// The value of a code, from the definition of the format (OCP 8-bit floating point, 2023).
double e4m3_value(int code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const double size = exponent == 0 ? fraction * 0x1p-9 : std::ldexp(8 + fraction, exponent - 10);
  return code & 0x80 ? -size : size;
}

int nearest_e4m3(double x) {
  int best = 0;
  for (int code = 1; code < 0x7f; ++code) {
    const double d = std::fabs(e4m3_value(code) - std::fabs(x));
    const double b = std::fabs(e4m3_value(best) - std::fabs(x));
    if (d < b || (d == b && code % 2 == 0)) best = code;
  }
  return std::signbit(x) ? best | 0x80 : best;
}

TEST(RowCodec, NumbersBecomeTheNearestCode) {
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  constexpr int kBlock = 128;
  const RowCodec codec(kernels, RowFormat::kFp8, 3 * kBlock - 28);
  std::mt19937 random(1);
  std::vector<std::byte> encoded(codec.bytes());
  for (int round = 0; round < 200; ++round) {
    std::vector<float> row(3 * kBlock - 28), decoded(row.size(), kNan);
    for (size_t i = 0; i < row.size(); ++i) {
      const int code = static_cast<int>(i % kBlock) % 127;
      const double random_size = std::exp2(double(random() % 2200) / 100 - 13);
      const double size = round == 0   ? e4m3_value(code)
                          : round == 1 ? (e4m3_value(code) + e4m3_value(std::max(code - 1, 0))) / 2
                                       : std::min(random_size, 448.0);
      row[i] = static_cast<float>(random() % 2 ? size : -size);
    }
    // The scales become 1, 2 and 1/4: the numbers of a block are those of the codes times its
    // scale.
    constexpr float kScales[] = {1, 2, 0.25f};
    for (size_t i = 0; i < row.size(); ++i) row[i] *= kScales[i / kBlock];
    for (size_t b = 0; b < 3; ++b) row[b * kBlock] = 448 * kScales[b];
    codec.encode(row.data(), encoded.data());
    codec.decode(encoded.data(), decoded.data());
    for (size_t i = 0; i < row.size(); ++i) {
      const float scale = kScales[i / kBlock];
      const int want = nearest_e4m3(double(row[i]) / scale);
      ASSERT_EQ(static_cast<int>(encoded[i]), want) << row[i] / scale;
      ASSERT_EQ(decoded[i], static_cast<float>(e4m3_value(want)) * scale);
    }
  }
}

TEST(RowCodec, ZerosAndNumbersThatAreNone) {
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  for (const RowFormat format : {RowFormat::kF32, RowFormat::kBf16, RowFormat::kFp8}) {
    const RowCodec codec(kernels, format, 5);
    std::vector<std::byte> encoded(codec.bytes());
    std::vector<float> zeros(5, 0.f), decoded(5, kNan);
    codec.encode(zeros.data(), encoded.data());
    codec.decode(encoded.data(), decoded.data());
    EXPECT_EQ(decoded, zeros);
    const std::vector<float> row = {1, kNan, -2, 0, 0.5f};  // one block: FP8 makes all of it NaN
    codec.encode(row.data(), encoded.data());
    codec.decode(encoded.data(), decoded.data());
    EXPECT_TRUE(std::isnan(decoded[1]));
    for (const int i : {0, 2, 3, 4})
      EXPECT_TRUE(format == RowFormat::kFp8 ? std::isnan(decoded[i]) : decoded[i] == row[i]);
  }
}

}  // namespace
}  // namespace tandem::test
