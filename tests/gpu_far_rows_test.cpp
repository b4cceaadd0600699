// Rows more than 2^31 numbers apart: every kernel computes the same as with rows side by side. The
// memory is the host's, reserved and mostly not touched, so this needs an emulated GPU.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "core/memory.h"
#include "gpu_kernels/attention/attention.h"
#include "gpu_kernels/attention/plain_attention.h"
#include "gpu_kernels/exchange/hand_off.h"
#include "gpu_kernels/kernels.h"
#include "gpu_kernels/products/plain_products.h"
#include "gpu_kernels/products/products.h"
#include "gpu_kernels/router.h"
#include "gpu_kernels/sampling.h"
#include "gpu_kernels/unpack.h"

namespace tandem::gpu {
namespace {

constexpr int64_t kFar = (int64_t{1} << 31) + 64;
constexpr int kFarCols = 16;

// Rows of kFarCols numbers.
template <class T>
class Rows {
 public:
  Rows(int64_t n, int64_t stride)
      : n_(n), stride_(stride), memory_(((n - 1) * stride + 4096) * int64_t{sizeof(T)}) {}

  T* data() const { return reinterpret_cast<T*>(memory_.data()); }
  T& at(int64_t row, int64_t column) const { return data()[row * stride_ + column]; }
  int64_t stride() const { return stride_; }
  Matrix matrix() const { return {data(), stride_}; }

  template <class Number>
  const Rows& fill(Number number) const {
    for (int64_t row = 0; row < n_; ++row)
      for (int64_t column = 0; column < kFarCols; ++column) at(row, column) = number();
    return *this;
  }
  std::vector<T> values() const {
    std::vector<T> all;
    for (int64_t row = 0; row < n_; ++row)
      all.insert(all.end(), &at(row, 0), &at(row, 0) + kFarCols);
    return all;
  }

 private:
  int64_t n_, stride_;
  tandem::Buffer memory_;
};

class GpuFarRows : public testing::Test {
 protected:
  void SetUp() override {
    if (!open_gpu().emulated) GTEST_SKIP() << "the memory of a GPU is not sparse";
  }

  // Calls work(stride), which computes `out` from random numbers, for both strides.
  template <class Work>
  void expect_equal(const Work& work) {
    std::vector<double> found[2];
    for (const bool far : {false, true}) {
      rng_.seed(3);
      const auto out = work(far ? kFar : 32);
      stream_.wait();
      for (const auto& value : out.values()) found[far].push_back(number_of(value));
    }
    EXPECT_EQ(found[0], found[1]);
    EXPECT_NE(found[0], std::vector<double>(found[0].size())) << "nothing was computed";
  }
  static double number_of(float v) { return v; }
  static double number_of(int32_t v) { return v; }
  static double number_of(uint8_t v) { return v; }
  static double number_of(bf16 v) { return widen(v); }
  static double number_of(fp8_e4m3 v) { return widen(v); }

  float number() { return static_cast<float>(static_cast<int>(rng_() % 15) - 7) / 4; }
  Rows<float> floats(int64_t n, int64_t stride) {
    Rows<float> rows(n, stride);
    rows.fill([&] { return number(); });
    return rows;
  }
  Rows<bf16> halves(int64_t n, int64_t stride) {
    Rows<bf16> rows(n, stride);
    rows.fill([&] { return narrow(number()); });
    return rows;
  }
  Rows<fp8_e4m3> codes(int64_t n, int64_t stride) {
    Rows<fp8_e4m3> rows(n, stride);
    rows.fill([&] { return fp8_e4m3{static_cast<uint8_t>(rng_() % 0x50)}; });
    return rows;
  }
  static Weight weight(const Rows<bf16>& rows, int n) {
    return {.data = rows.data(),
            .stride = rows.stride(),
            .type = Number::kBF16,
            .rows = n,
            .cols = kFarCols};
  }
  // Each row has a scale of its own.
  static Weight weight(const Rows<fp8_e4m3>& rows, const Rows<float>& scales, int n) {
    return {.data = rows.data(),
            .stride = rows.stride(),
            .type = Number::kF8E4M3,
            .rows = n,
            .cols = kFarCols,
            .scale = scales.data(),
            .scale_stride = scales.stride(),
            .block_rows = 1,
            .block_cols = 128};
  }

  Stream stream_;
  std::mt19937 rng_;
  const int32_t exchanged_[2] = {1, 0};
  const int32_t in_order_[2] = {0, 1};
  float ones_[kFarCols] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
};

TEST_F(GpuFarRows, Elementwise) {
  expect_equal([&](int64_t stride) {
    const auto table = halves(2, stride);
    Rows<float> out(2, stride);
    embed(stream_, {exchanged_, table.data(), stride, Number::kBF16, out.matrix(), 2, kFarCols});
    stream_.wait();
    return out;
  });
  expect_equal([&](int64_t stride) {
    const auto x = floats(2, stride);
    Rows<float> out(2, stride);
    gather_rows(stream_, {x.matrix(), exchanged_, out.matrix(), 2, kFarCols});
    stream_.wait();
    return out;
  });
  for (const auto verb : {add, silu_mul})
    expect_equal([&](int64_t stride) {
      auto x = floats(2, stride);
      const auto other = floats(2, stride);
      verb(stream_, {x.matrix(), other.matrix(), 2, kFarCols});
      stream_.wait();
      return x;
    });
  expect_equal([&](int64_t stride) {
    auto x = floats(2, stride);
    clear(stream_, {x.matrix(), {}, 2, 3});
    stream_.wait();
    return x;
  });
  expect_equal([&](int64_t stride) {
    auto x = floats(2, stride);
    rope(stream_, {x.matrix(), in_order_, ones_, 1.5f, 2, 1, kFarCols / 2});
    stream_.wait();
    return x;
  });
  expect_equal([&](int64_t stride) {
    const auto x = floats(2, stride);
    Rows<float> out(2, stride);
    rms_norm(stream_, {x.matrix(), ones_, out.matrix(), 2, kFarCols, 1e-6f});
    stream_.wait();
    return out;
  });
}

TEST_F(GpuFarRows, Caches) {
  expect_equal([&](int64_t stride) {
    const auto kv = floats(2, stride);
    Rows<bf16> cache(2, stride);
    append_kv(stream_, {kv.matrix(), exchanged_, cache.data(), stride, 2, kFarCols});
    stream_.wait();
    return cache;
  });
  expect_equal([&](int64_t stride) {
    auto kv = floats(2, stride);
    Rows<bf16> cache(2, stride);
    rotate_and_append(stream_, {.q_rope = {kv.data() + 4, stride},
                                .kv = kv.matrix(),
                                .gain = ones_,
                                .eps = 0,
                                .positions = in_order_,
                                .frequencies = ones_,
                                .rows_of_cache = exchanged_,
                                .cache = cache.data(),
                                .cache_stride = stride,
                                .fp8 = false,
                                .amplitude = 1,
                                .tokens = 2,
                                .n_heads = 1,
                                .kv_rank = 2,
                                .rope_dim = 2});
    stream_.wait();
    return cache;
  });
  // Rows of the FP8 cache have a fixed size, so it is their number that is large.
  expect_equal([&](int64_t stride) {
    const auto kv = floats(2, stride);
    const int32_t rows[] = {stride == kFar ? 4'000'000 : 1, 0};
    const int64_t row_bytes = int64_t{rows[0]} * kFp8TokenBytes;
    Rows<uint8_t> cache(2, row_bytes);
    append_fp8(stream_, {kv.data(), stride, rows, cache.data(), 2, 8, 8});
    stream_.wait();
    return cache;
  });
}

TEST_F(GpuFarRows, Routing) {
  const auto routed = [&](int64_t stride, const Rows<int32_t>& ids, const Rows<float>& weights) {
    const auto logits = floats(2, stride);
    route(stream_, {.logits = logits.matrix(),
                    .bias = nullptr,
                    .weights = weights.matrix(),
                    .ids = ids.data(),
                    .ids_stride = stride,
                    .tokens = 2,
                    .n_experts = kFarCols,
                    .n_active = 3,
                    .n_groups = 1,
                    .n_active_groups = 1,
                    .scoring = RouterScoring::kSoftmax,
                    .group_score = GroupScore::kNone,
                    .normalize = true,
                    .scale = 1});
    stream_.wait();
  };
  expect_equal([&](int64_t stride) {
    const Rows<int32_t> ids(2, stride);
    Rows<float> weights(2, stride);
    routed(stride, ids, weights);
    stream_.wait();
    return weights;
  });
  expect_equal([&](int64_t stride) {
    Rows<int32_t> ids(2, stride);
    const Rows<float> weights(2, stride);
    routed(stride, ids, weights);
    stream_.wait();
    return ids;
  });
  expect_equal([&](int64_t stride) {
    Rows<int32_t> ids(2, stride), sorted(1, stride);
    int32_t n = 5;
    ids.fill([&] { return n = n * 7 % 11; });
    sort_pairs(stream_, {.ids = ids.data(),
                         .ids_stride = stride,
                         .offsets = &sorted.at(0, 32),
                         .row_of = &sorted.at(0, 0),
                         .tokens_of_rows = &sorted.at(0, 8),
                         .tokens = 2,
                         .n_active = 3,
                         .n_experts = 11});
    stream_.wait();
    return sorted;
  });
  expect_equal([&](int64_t stride) {
    const Rows<int32_t> ids(2, stride);
    for (int i = 0; i < 3; ++i) ids.at(1, i) = i + 1;
    const int32_t place[] = {7, 5, 4, 3};
    Rows<int32_t> out(1, stride);
    place_experts(stream_, {ids.data(), stride, place, out.data(), 2, 3});
    stream_.wait();
    return out;
  });
  expect_equal([&](int64_t stride) {
    const auto x = floats(2, stride), weights = floats(2, stride);
    const Rows<int32_t> ids(2, stride);
    ids.at(1, 0) = 9;
    Rows<float> out(5, 32);
    hand_down(stream_, {.x = x.matrix(),
                        .ids = ids.data(),
                        .ids_stride = stride,
                        .weights = weights.matrix(),
                        .gpu_place = nullptr,
                        .gpu_ids = nullptr,
                        .to = {reinterpret_cast<int32_t*>(&out.at(4, 0)), &out.at(3, 0),
                               &out.at(2, 0), out.data(), 128},
                        .type = RowType::kF32,
                        .tokens = 2,
                        .n_active = 2,
                        .dim = kFarCols});
    stream_.wait();
    return out;
  });
}

TEST_F(GpuFarRows, RoundedRows) {
  expect_equal([&](int64_t stride) {
    const auto x = floats(2, stride);
    Rows<bf16> out(2, kFarCols);
    round_rows(stream_, {x.data(), out.data(), stride, kFarCols, 2, kFarCols});
    stream_.wait();
    return out;
  });
  const auto rounded = [&](int64_t stride, const Rows<fp8_e4m3>& out, const Rows<float>& scales) {
    const auto x = floats(2, stride);
    round_rows_fp8(stream_,
                   {x.data(), {out.data(), scales.data(), stride, stride}, stride, 2, kFarCols});
    stream_.wait();
  };
  expect_equal([&](int64_t stride) {
    Rows<fp8_e4m3> out(2, stride);
    const Rows<float> scales(2, stride);
    rounded(stride, out, scales);
    stream_.wait();
    return out;
  });
  expect_equal([&](int64_t stride) {
    const Rows<fp8_e4m3> out(2, stride);
    Rows<float> scales(2, stride);
    rounded(stride, out, scales);
    stream_.wait();
    return scales;
  });
  expect_equal([&](int64_t stride) {
    const auto rows = floats(2, stride);
    Rows<float> y(2, stride);
    combine_experts(
        stream_, {rows.data(), exchanged_, ones_, y.data(), stride, stride, 2, 1, kFarCols, true});
    stream_.wait();
    return y;
  });
}

TEST_F(GpuFarRows, Products) {
  for (const bool fp8 : {false, true}) {
    SCOPED_TRACE(fp8 ? "FP8" : "BF16");
    // multiply(x, w, out, stride)
    const auto expect_products = [&](const auto& multiply) {
      expect_equal([&](int64_t stride) {
        const auto x = floats(2, stride), scales = floats(2, stride);
        const auto of_halves = halves(2, stride);
        const auto of_codes = codes(2, stride);
        Rows<float> out(2, stride);
        multiply(x, fp8 ? weight(of_codes, scales, 2) : weight(of_halves, 2), out, stride);
        stream_.wait();
        return out;
      });
    };
    using X = const Rows<float>&;
    expect_products([&](X x, const Weight& w, X out, int64_t stride) {
      exact_product(stream_, {x.data(), w, out.data(), stride, stride, 2});
    });
    expect_products([&](X x, const Weight& w, X out, int64_t stride) {
      skinny_product(stream_, {x.data(), w, out.data(), stride, stride, 2, {}, 1});
    });
    expect_products([&](X x, const Weight& w, X out, int64_t stride) {
      const Rows<bf16> rounded(2, stride);
      for (int row = 0; row < 2; ++row)
        for (int c = 0; c < kFarCols; ++c)
          rounded.at(row, product_column(c)) = narrow(x.at(row, c));
      matrix_product(stream_, {.x = rounded.data(),
                               .w = w,
                               .out = out.data(),
                               .x_stride = stride,
                               .out_stride = stride,
                               .n_tokens = 2,
                               .workspace = {},
                               .n_multiprocessors = 1});
      stream_.wait();
    });
    for (const bool transposed : {false, true}) {
      expect_products([&](X x, const Weight& w, X out, int64_t) {
        plain_product(stream_, {.x = x.matrix(),
                                .w = w,
                                .out = out.matrix(),
                                .tokens = 2,
                                .x_cols = transposed ? 2 : kFarCols,
                                .out_cols = transposed ? kFarCols : 2,
                                .n_heads = 1,
                                .first_row = 0,
                                .rows_per_head = 2,
                                .transposed = transposed});
      });
      // Two heads with a row each.
      expect_products([&](X x, const Weight& w, X out, int64_t stride) {
        per_head_product(stream_, {.x = x.data(),
                                   .w = w,
                                   .out = out.data(),
                                   .x_stride = stride,
                                   .out_stride = stride,
                                   .n_tokens = 1,
                                   .n_heads = 2,
                                   .x_cols = transposed ? 1 : kFarCols,
                                   .out_cols = transposed ? kFarCols : 1,
                                   .first_row = 0,
                                   .rows_per_head = 1,
                                   .transposed = transposed});
      });
    }
  }
  // x in FP8.
  expect_equal([&](int64_t stride) {
    const auto x = codes(2, stride), w = codes(2, stride);
    const auto x_scales = floats(2, stride), scales = floats(2, stride);
    Rows<float> out(2, stride);
    matrix_product(stream_, {.x = nullptr,
                             .x_fp8 = {x.data(), x_scales.data(), stride, stride},
                             .w = weight(w, scales, 2),
                             .out = out.data(),
                             .x_stride = 0,
                             .out_stride = stride,
                             .n_tokens = 2,
                             .workspace = {},
                             .n_multiprocessors = 1});
    stream_.wait();
    return out;
  });
}

// Two experts of kFarCols rows; the matrices of the second are far away.
TEST_F(GpuFarRows, Experts) {
  constexpr int64_t kSize = kFarCols * kFarCols;  // numbers of a matrix
  const auto matrices = [&](int64_t stride) {
    Rows<bf16> two(2, stride * kFarCols);
    for (int64_t e = 0; e < 2; ++e)
      for (int64_t i = 0; i < kSize; ++i) two.data()[e * stride * kFarCols + i] = narrow(number());
    return two;
  };
  const auto first_of = [&](const Rows<bf16>& two) {
    return Weight{.data = two.data(),
                  .stride = kFarCols,
                  .type = Number::kBF16,
                  .rows = kFarCols,
                  .cols = kFarCols};
  };
  expect_equal([&](int64_t stride) {
    const auto gate = matrices(stride), up = matrices(stride), down = matrices(stride);
    const auto bytes = 2 * stride * kFarCols;
    const auto x = floats(2, stride), weights = floats(2, stride);
    const Rows<int32_t> ids(2, stride);
    ids.at(0, 0) = 1;
    weights.at(0, 0) = weights.at(1, 0) = 1;
    const Rows<float> hidden(2, stride);
    Rows<float> y(2, stride);
    plain_experts(stream_, {.x = x.matrix(),
                            .gate = {first_of(gate), bytes, 0},
                            .up = {first_of(up), bytes, 0},
                            .down = {first_of(down), bytes, 0},
                            .ids = ids.data(),
                            .ids_stride = stride,
                            .weights = weights.matrix(),
                            .hidden = hidden.matrix(),
                            .y = y.matrix(),
                            .tokens = 2,
                            .n_active = 1});
    stream_.wait();
    return y;
  });
  const int32_t offsets[] = {0, 1, 2};
  const ExpertRows rows = {.offsets = offsets, .n_experts = 2, .max_rows = 2};
  expect_equal([&](int64_t stride) {
    const auto gate = matrices(stride), up = matrices(stride);
    const auto x = halves(2, stride);
    Rows<bf16> hidden(2, kFarCols);  // its stride decides how many columns are written
    grouped_gate_up(stream_, {.x = x.data(),
                              .tokens = exchanged_,
                              .rows = rows,
                              .gate = {first_of(gate), 2 * stride * kFarCols, 0},
                              .up = {first_of(up), 2 * stride * kFarCols, 0},
                              .hidden = hidden.data(),
                              .x_stride = stride,
                              .hidden_stride = kFarCols});
    stream_.wait();
    return hidden;
  });
  expect_equal([&](int64_t stride) {
    const auto down = matrices(stride);
    const auto hidden = halves(2, stride);
    Rows<float> out(2, stride);
    grouped_down(stream_, {.hidden = hidden.data(),
                           .rows = rows,
                           .down = {first_of(down), 2 * stride * kFarCols, 0},
                           .out = out.data(),
                           .hidden_stride = stride,
                           .out_stride = stride});
    stream_.wait();
    return out;
  });
  // With FP8, the scales of the second expert are far away as well.
  const auto coded = [&](int64_t stride) {
    Rows<fp8_e4m3> two(2, stride * kFarCols);
    for (int64_t e = 0; e < 2; ++e)
      for (int64_t i = 0; i < kSize; ++i)
        two.data()[e * stride * kFarCols + i] = {static_cast<uint8_t>(rng_() % 0x50)};
    return two;
  };
  expect_equal([&](int64_t stride) {
    const auto down = coded(stride);
    const auto scales = floats(2, stride);
    const auto hidden = codes(2, stride);
    const auto hidden_scales = floats(2, stride);
    Rows<float> out(2, stride);
    const Weight first = {.data = down.data(),
                          .stride = kFarCols,
                          .type = Number::kF8E4M3,
                          .rows = kFarCols,
                          .cols = kFarCols,
                          .scale = scales.data(),
                          .scale_stride = 1,
                          .block_rows = 128,
                          .block_cols = 128};
    grouped_down(stream_, {.hidden = nullptr,
                           .hidden_fp8 = {hidden.data(), hidden_scales.data(), stride, stride},
                           .rows = rows,
                           .down = {first, stride * kFarCols, stride},
                           .out = out.data(),
                           .hidden_stride = 0,
                           .out_stride = stride});
    stream_.wait();
    return out;
  });
  expect_equal([&](int64_t stride) {
    const auto hidden = halves(2, stride);
    Rows<fp8_e4m3> out(2, stride);
    const Rows<float> scales(2, stride);
    round_hidden_fp8(stream_, {.hidden = hidden.data(),
                               .rows = rows,
                               .out = {out.data(), scales.data(), stride, stride},
                               .hidden_stride = stride,
                               .cols = kFarCols});
    stream_.wait();
    return out;
  });
}

// Seventeen rows of an expert in two panels, 32 columns of BF16 each.
TEST_F(GpuFarRows, Panels) {
  expect_equal([&](int64_t stride) {
    const int64_t panel_bytes = stride == kFar ? kFar : 1024;
    const Rows<uint8_t> panels(2, panel_bytes);
    for (int64_t panel = 0; panel < 2; ++panel)
      for (int64_t i = 0; i < 1024; ++i)
        panels.data()[panel * panel_bytes + i] = static_cast<uint8_t>(rng_());
    Rows<uint8_t> out(17, stride == kFar ? kFar / 4 : 64);
    unpack_panels(stream_, {.panels = panels.data(),
                            .panel_bytes = panel_bytes,
                            .type = Number::kBF16,
                            .out = out.data(),
                            .row_bytes = out.stride(),
                            .rows = 17,
                            .bytes = 64});
    stream_.wait();
    return out;
  });
}

// One sequence of 200 tokens on pages with small or large numbers. Queries, outputs and the parts
// of the outputs are far apart, too.
TEST_F(GpuFarRows, Attention) {
  constexpr int kTokens = 200, kRank = 8, kRope = 8, kHeads = 2;
  for (const bool fp8 : {false, true}) {
    SCOPED_TRACE(fp8 ? "FP8" : "BF16");
    expect_equal([&](int64_t stride) {
      const int32_t first_page = stride == kFar ? (fp8 ? 60'000 : 3'000'000) : 0;
      const int32_t pages[] = {first_page + 2, first_page, first_page + 3, first_page + 1};
      const int64_t token_bytes = fp8 ? kFp8TokenBytes : 2 * (kRank + kRope);
      const tandem::Buffer memory((first_page + 4) * kPageTokens * token_bytes);
      for (int t = 0; t < kTokens; ++t) {
        std::byte* const token =
            memory.data() +
            (int64_t{pages[t / kPageTokens]} * kPageTokens + t % kPageTokens) * token_bytes;
        for (int64_t i = 0; i < token_bytes / 2; ++i) {
          const bf16 v = narrow(number() / 8);
          std::memcpy(token + 2 * i, &v, 2);
        }
        for (int64_t i = 0; fp8 && i < kMaxKvRank; ++i)
          token[i] = static_cast<std::byte>(rng_() % 0x40);
        const float scale = 0.25;
        for (int64_t i = 0; fp8 && i < 4; ++i)
          std::memcpy(token + kMaxKvRank + 4 * i, &scale, sizeof scale);
      }
      const LatentCache cache = {memory.data(), kRank + kRope, kRank, kRope, fp8};
      const auto q = floats(kHeads, stride), q_rope = floats(kHeads, stride);
      const int64_t n_rows = stride == kFar ? kFar / kMaxKvRank : kHeads;
      const tandem::Buffer partial(2 * n_rows * kMaxKvRank * 4), lse(2 * n_rows * 4);
      const int32_t first = 0, n = 1, length = kTokens;
      Rows<float> out(2 * kHeads, stride);
      mla_decode(stream_, {.q = q.data(),
                           .q_rope = q_rope.data(),
                           .cache = cache,
                           .sequences = {&first, &n, &length, pages, 1, 4, 1},
                           .partial = reinterpret_cast<float*>(partial.data()),
                           .partial_lse = reinterpret_cast<float*>(lse.data()),
                           .out = out.data(),
                           .q_stride = stride,
                           .q_rope_stride = stride,
                           .out_stride = stride,
                           .n_rows = n_rows,
                           .n_heads = kHeads,
                           .n_splits = 2,
                           .softmax_scale = 0.5f});
      const auto kv_b = halves(kHeads * 2 * kRank, kFarCols);
      Weight w = weight(kv_b, kHeads * 2 * kRank);
      w.cols = kRank;
      const Rows<bf16> latents(kTokens, kFarCols), restored(kTokens, kHeads * 2 * kRank);
      mla_prefill(stream_, {.q = q.data(),
                            .q_rope = q_rope.data(),
                            .cache = cache,
                            .pages = pages,
                            .kv_b = w,
                            .latents = latents.data(),
                            .restored = restored.data(),
                            .carried = nullptr,
                            .out = &out.at(kHeads, 0),
                            .q_stride = stride,
                            .q_rope_stride = stride,
                            .out_stride = stride,
                            .n_tokens = 1,
                            .kv_length = kTokens,
                            .n_heads = kHeads,
                            .nope_dim = kRank,
                            .v_dim = kRank,
                            .plan = {kHeads, kTokens},
                            .softmax_scale = 0.5f});
      stream_.wait();
      return out;
    });
  }
  // The plain kernel: pages of one token.
  expect_equal([&](int64_t stride) {
    const auto cache = halves(3, stride);
    const auto q = floats(kHeads, stride), q_rope = floats(kHeads, stride);
    const int32_t position = 2, pages[] = {2, 0, 1}, zero = 0;
    Rows<float> out(kHeads, stride);
    plain_attention(stream_, {.q = q.matrix(),
                              .q_rope = q_rope.matrix(),
                              .cache = cache.data(),
                              .cache_stride = stride,
                              .at = {&zero, &position, pages, 3, 1},
                              .out = out.matrix(),
                              .first_token = 0,
                              .n_tokens = 1,
                              .n_heads = kHeads,
                              .rank = kRank,
                              .rope_dim = kRope,
                              .scale = 0.5f});
    stream_.wait();
    return out;
  });
}

TEST_F(GpuFarRows, Draws) {
  expect_equal([&](int64_t stride) {
    const auto logits = floats(2, stride);
    const DrawRow how = {
        .row = 1, .temperature = 0, .top_p = 1, .min_p = 0, .top_k = 0, .uniform = 0};
    const uint32_t allowed = 0xffff;
    for (int i = 0; i < 2; ++i) logits.at(i, i + 3) = 9;
    Rows<int32_t> token(1, stride);
    draw(stream_, {logits.matrix(), &how, &allowed, token.data(), 1, kFarCols});
    stream_.wait();
    EXPECT_EQ(token.at(0, 0), 4);
    return token;
  });
}

}  // namespace
}  // namespace tandem::gpu
