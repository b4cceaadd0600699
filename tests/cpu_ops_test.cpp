// Operations on matrices whose rows lie more than 2^31 numbers apart give the same bits as with
// rows side by side, and copies are whole. The memory is reserved and mostly not touched.
#include "ops/cpu_ops.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "tests/small_config.h"

namespace tandem {
namespace {

constexpr int64_t kFar = (int64_t{1} << 31) + 64, kNear = 64;
constexpr int kCols = 16;

class CpuOpsFarRows : public testing::Test {
 protected:
  // Calls work(stride), which returns a matrix computed from random numbers, for both strides.
  template <class Work>
  void expect_equal(const Work& work) {
    std::vector<std::vector<float>> found;
    for (const int64_t stride : {kNear, kFar}) {
      rng_.seed(3);
      const TensorView out = work(stride);
      std::vector<float>& all = found.emplace_back();
      for (int64_t r = 0; r < out.rows; ++r)
        for (int64_t c = 0; c < out.cols; ++c)
          all.push_back(out.dtype == DType::kI32 ? static_cast<float>(out.row<int32_t>(r)[c])
                                                 : out.row<float>(r)[c]);
      memory_.clear();
    }
    EXPECT_EQ(found[0], found[1]);
    EXPECT_NE(found[0], std::vector<float>(found[0].size())) << "nothing was computed";
  }

  TensorView zeros(int64_t rows, int64_t stride, DType dtype = DType::kF32, int64_t cols = kCols) {
    memory_.emplace_back(((rows - 1) * stride + 64) * size_of(dtype));
    return {memory_.back().data(), rows, cols, stride, dtype};
  }
  TensorView numbers(int64_t rows, int64_t stride, int64_t cols = kCols) {
    const TensorView m = zeros(rows, stride, DType::kF32, cols);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c)
        m.row<float>(r)[c] = static_cast<float>(static_cast<int>(rng_() % 15) - 7) / 4;
    return m;
  }
  QuantView weight(int64_t rows, int64_t stride, int64_t cols = kCols) {
    return {.q = numbers(rows, stride, cols), .scale = {}};
  }

  static ModelConfig config() {
    ModelConfig c = small_config();
    c.mla = {.n_heads = 2, .q_rank = 8, .kv_rank = 8, .nope_dim = 8, .rope_dim = 8, .v_dim = 8};
    return c;
  }

  std::mt19937 rng_;
  std::vector<Buffer> memory_;
  const ModelConfig config_ = config();
  const cpu::KernelTable kernels_ = cpu::kernels_for(cpu::Isa::kReference);
  Team team_{1};
  CpuOps ops_{kernels_, config_, 64, team_};
  const std::vector<int32_t> exchanged_ = {1, 0}, in_order_ = {0, 1};
};

TEST_F(CpuOpsFarRows, RowByRow) {
  expect_equal([&](int64_t stride) {
    const TensorView out = zeros(2, stride);
    ops_.embed(exchanged_, weight(2, stride), out);
    return out;
  });
  expect_equal([&](int64_t stride) {
    const TensorView out = zeros(2, stride);
    ops_.rms_norm(numbers(2, stride), weight(1, stride), 1e-6f, out);
    return out;
  });
  expect_equal([&](int64_t stride) {
    const TensorView x = numbers(2, stride);
    ops_.add(x, numbers(2, stride));
    return x;
  });
  expect_equal([&](int64_t stride) {
    const TensorView x = numbers(2, stride);
    ops_.clear(x.cols_from(0, 3));
    return x;
  });
  expect_equal([&](int64_t stride) {
    const TensorView gate = numbers(2, stride);
    ops_.silu_mul(gate, numbers(2, stride));
    return gate;
  });
  expect_equal([&](int64_t stride) {
    const TensorView out = zeros(2, stride);
    ops_.gather_rows(numbers(2, stride), exchanged_, out);
    return out;
  });
  expect_equal([&](int64_t stride) {
    const std::vector<float> frequencies(kCols / 2, 0.5f);
    const TensorView x = numbers(2, stride);
    ops_.rope(x, in_order_, {frequencies, 1.5f});
    return x;
  });
}

TEST_F(CpuOpsFarRows, Products) {
  expect_equal([&](int64_t stride) {
    const TensorView out = zeros(2, stride, DType::kF32, 3);
    ops_.linear(numbers(2, stride), weight(3, stride), out);
    return out;
  });
  // Two heads of two tokens, with three rows of w each after the first one.
  for (const bool transposed : {false, true})
    expect_equal([&](int64_t stride) {
      const TensorView out = zeros(4, stride, DType::kF32, transposed ? kCols : 3);
      ops_.linear_per_head({.x = numbers(4, stride, transposed ? 3 : kCols),
                            .w = weight(7, stride),
                            .n_heads = 2,
                            .first_row = 1,
                            .rows_per_head = 3,
                            .transposed = transposed,
                            .out = out});
      return out;
    });
}

TEST_F(CpuOpsFarRows, Routing) {
  RouterConfig router = config_.router;
  const auto routed = [&](int64_t stride) {
    const Routing out = {zeros(2, stride, DType::kI32, router.n_active),
                         zeros(2, stride, DType::kF32, router.n_active)};
    ops_.route({numbers(2, stride), weight(router.n_experts, 64), weight(1, 64), router,
                zeros(2, stride, DType::kF32, router.n_experts), out});
    return out;
  };
  expect_equal([&](int64_t stride) { return routed(stride).ids; });
  expect_equal([&](int64_t stride) { return routed(stride).weights; });
}

TEST_F(CpuOpsFarRows, RoutingAddsToTheUsesOfExperts) {
  const RouterConfig router = config_.router;
  const int64_t n_active = router.n_active;
  std::vector<uint32_t> uses(router.n_experts + 1, 7), want = uses;
  uses[1] = want[1] = ~0u;  // the next number is 0
  for (const int64_t n : {5, 3}) {
    const Routing out = {zeros(n, n_active + 3, DType::kI32, n_active),
                         zeros(n, n_active, DType::kF32, n_active)};
    const auto route = [&](uint32_t* counted) {
      ops_.route({numbers(n, 64), weight(router.n_experts, 64), weight(1, 64), router,
                  zeros(n, router.n_experts), out, counted});
    };
    route(nullptr);
    ASSERT_EQ(uses, want) << "not counted";
    route(uses.data());
    for (int64_t t = 0; t < n; ++t)
      for (int64_t k = 0; k < n_active; ++k) ++want[out.ids.row<int32_t>(t)[k]];
    ASSERT_EQ(uses, want);
  }
}

// 70 tokens of one sequence on two pages, which are far into the cache, and one token more.
TEST_F(CpuOpsFarRows, Attention) {
  const MlaConfig& m = config_.mla;
  constexpr int kTokens = 70;
  for (const bool naive : {false, true})
    expect_equal([&](int64_t stride) {
      const int32_t first_page = stride == kFar ? static_cast<int32_t>(kFar / kPageSize) : 0;
      const std::vector<int32_t> pages = {first_page + 1, first_page};
      const TensorView cache = zeros((first_page + 2) * int64_t{kPageSize}, kCols);
      std::vector<int32_t> tokens(kTokens), positions(kTokens);
      for (int t = 0; t < kTokens; ++t) positions[t] = t;
      const Sequence all = {0, kTokens, kTokens, pages};
      ops_.append_kv({tokens, positions, {&all, 1}, {}}, numbers(kTokens, kCols), cache);
      const Sequence last = {0, 1, kTokens, pages};
      const TensorView out = zeros(m.n_heads, stride, DType::kF32, 8);
      const MlaArgs args = {
          {&last, 1}, numbers(m.n_heads, stride, 8), numbers(m.n_heads, stride, 8), cache, m, 0.3f,
          out};
      if (naive)
        ops_.mla_naive(args, weight(m.n_heads * (m.nope_dim + m.v_dim), 64, m.kv_rank));
      else
        ops_.mla_absorbed(args);
      return out;
    });
}

TEST(CpuDevice, CopiesEveryByteAndNoMore) {
  Team team(2 <= n_cores() ? 2 : 1);
  CpuDevice device(team);
  std::mt19937 rng(1);
  for (const int64_t bytes : {0, 1, 65535, 65536, 65537, 300'000}) {
    std::vector<char> from(bytes + 2), to(bytes + 2, 'x');
    for (char& c : from) c = static_cast<char>(rng() % 100 + 'y');
    device.copy(from.data() + 1, bytes, to.data() + 1);
    EXPECT_EQ(std::memcmp(from.data() + 1, to.data() + 1, bytes), 0) << bytes;
    EXPECT_EQ(to.front(), 'x') << bytes;
    EXPECT_EQ(to.back(), 'x') << bytes;
  }
}

}  // namespace
}  // namespace tandem
