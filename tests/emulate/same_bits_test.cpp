// Emulated and native kernels give the same bits where this machine runs both, which validates the
// emulation. Inputs include every weight code, subnormals, and sums near underflow.
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
         {Shape{1, 40, 300}, {1, 128, 300}, {2, 17, 129}, {9, 70, 257}, {35, 33, 130}, {1, 3, 5}}) {
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
          // Weights packed by one table can be multiplied by the other.
          emulated_.gemm({xa.view, kernel_weight(a.w), 0, got.data(), n, m, n, k});
          ASSERT_EQ(bits_of(got), bits_of(want)) << name_of(dtype) << " packed natively";
        }
      }
    }
  }
}

// Covers dimensions with and without tiles, full and partial blocks of keys, and tokens that see a
// part of a block.
TEST_P(SameBits, Attend) {
  struct Case {
    int queries, per_token, keys, dim, rope, v_dim;
  };
  for (const Case& c :
       {Case{70, 10, 150, 96, 32, 80}, Case{17, 1, 130, 64, 32, 512}, Case{3, 3, 40, 40, 8, 20}}) {
    const int width = c.dim + c.rope;
    const auto attend = [&](const cpu::KernelTable& t) {
      std::mt19937 rng(4);
      const std::vector<float> q = normal(rng, c.queries * width);
      std::vector<uint16_t> k, v;
      for (const float x : normal(rng, c.keys * width, 2)) k.push_back(to_bf16(x));
      for (const float x : normal(rng, c.keys * c.v_dim)) v.push_back(to_bf16(x));
      const int tokens = (c.queries + c.per_token - 1) / c.per_token;
      std::vector<cpu::KeyBlock> blocks;
      for (int first = 0; first < c.keys; first += cpu::kMaxKeys)
        blocks.push_back({&k[first * width], &k[first * width + c.dim], &v[first * c.v_dim],
                          std::min(cpu::kMaxKeys, c.keys - first), c.keys - tokens + 1 - first});
      std::vector<float> out(c.queries * c.v_dim, 0.f), sum(c.queries, 0.f),
          max(c.queries, -std::numeric_limits<float>::infinity());
      t.attend({.type = cpu::ActivationType::kBF16,
                .q = q.data(),
                .q_rope = q.data() + c.dim,
                .q_stride = width,
                .q_rope_stride = width,
                .blocks = blocks.data(),
                .n_blocks = static_cast<int>(blocks.size()),
                .k_stride = width * 2,
                .k_rope_stride = width * 2,
                .v_stride = c.v_dim * 2,
                .n_queries = c.queries,
                .dim = c.dim,
                .rope_dim = c.rope,
                .v_dim = c.v_dim,
                .first_query = 0,
                .queries_per_token = c.per_token,
                .scale = 0.1f,
                .out = out.data(),
                .out_stride = c.v_dim,
                .max = max.data(),
                .sum = sum.data()});
      out.insert(out.end(), max.begin(), max.end());
      out.insert(out.end(), sum.begin(), sum.end());
      return bits_of(out);
    };
    EXPECT_EQ(attend(native_), attend(emulated_)) << c.queries << " queries, " << c.dim;
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, SameBits, testing::ValuesIn(pairs()),
                         [](const auto& pair) { return pair.param.name; });

}  // namespace
}  // namespace tandem::test
