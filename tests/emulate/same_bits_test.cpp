// Emulated and native kernels give the same bits, where this machine runs both: what keeps the
// emulation honest. Inputs include every code of the weights, subnormals, and sums near underflow.
#include <gtest/gtest.h>

#include "tests/kernel_cases.h"
#include "tests/kernel_tables.h"

namespace tandem::test {
namespace {

struct Pair {
  std::string name;
  cpu::KernelTable native, emulated;
};

std::vector<Pair> pairs() {
  std::vector<Pair> all;
  for (const NamedTable& t : native_tables())
    all.push_back({t.name, t.kernels, cpu::emulated_table_of(t.kernels.isa, t.has)});
  return all;
}

class SameBits : public testing::TestWithParam<Pair> {
 protected:
  const cpu::KernelTable &native_ = GetParam().native, &emulated_ = GetParam().emulated;
  std::mt19937 rng_{1};
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SameBits);

std::vector<uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<uint32_t> bits;
  for (const float v : values) bits.push_back(std::bit_cast<uint32_t>(v));
  return bits;
}

TEST_P(SameBits, TablesChooseAlike) {
  EXPECT_EQ(native_.layout, emulated_.layout);
  EXPECT_STREQ(native_.name, emulated_.name);
  for (int w = 0; w < cpu::kNumWeightTypes; ++w)
    EXPECT_EQ(native_.activation[w], emulated_.activation[w]);
  EXPECT_NE(native_.gemm, emulated_.gemm);
}

TEST_P(SameBits, Encode) {
  for (const int k : {1, 31, 129, 1000}) {
    for (const cpu::ActivationType type : native_.activation) {
      if (type == cpu::ActivationType::kF32) continue;
      const std::vector<float> x = normal(rng_, k, k == 31 ? 1e-38f : 3);
      const Rows a(native_, type, x, 1, k, k), b(emulated_, type, x, 1, k, k);
      ASSERT_EQ(a.room.bytes(), b.room.bytes());
      EXPECT_EQ(std::memcmp(a.room.data(), b.room.data(), a.room.bytes()), 0) << k;
      EXPECT_EQ(bits_of(a.scales), bits_of(b.scales)) << k;
    }
  }
}

TEST_P(SameBits, PackAndGemm) {
  for (const DType dtype : kTypes) {
    for (const auto [m, n, k] :
         {Shape{1, 40, 300}, {2, 17, 129}, {9, 70, 257}, {35, 33, 130}, {1, 3, 5}}) {
      for (const cpu::ActivationType type : activations(native_, dtype)) {
        for (const float deviation : {1.f, 1e-37f}) {
          RandomModel store(with_block(128), dtype);
          const QuantView stored = random_weight(store, n, k, dtype);
          const Packed a(native_, stored), b(emulated_, stored);
          const std::vector<float> x = normal(rng_, m * k, deviation);
          const Rows xa(native_, type, x, m, k, k), xb(emulated_, type, x, m, k, k);
          std::vector<float> got(m * n, kNaN), want(m * n, kNaN);
          emulated_.gemm({xb.view, kernel_weight(b.w), 0, got.data(), n, m, n, k});
          native_.gemm({xa.view, kernel_weight(a.w), 0, want.data(), n, m, n, k});
          ASSERT_EQ(bits_of(got), bits_of(want))
              << name_of(dtype) << " " << m << " " << n << " " << k << " deviation " << deviation;
          // A kernel understands what the other one packed.
          emulated_.gemm({xa.view, kernel_weight(a.w), 0, got.data(), n, m, n, k});
          ASSERT_EQ(bits_of(got), bits_of(want)) << name_of(dtype) << " packed natively";
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, SameBits, testing::ValuesIn(pairs()),
                         [](const auto& pair) { return pair.param.name; });

}  // namespace
}  // namespace tandem::test
