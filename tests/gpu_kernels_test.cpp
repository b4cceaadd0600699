// Each small kernel against a plain loop over unusual shapes. Outputs are NaN before the call, and
// the space between rows must not change.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>

#include "gpu_kernels/attention/attention.h"
#include "gpu_kernels/attention/plain_attention.h"
#include "gpu_kernels/products/plain_products.h"
#include "gpu_kernels/products/products.h"
#include "gpu_kernels/router.h"
#include "gpu_kernels/sampling.h"
#include "tests/gpu_memory.h"

namespace tandem::gpu {
namespace {

struct Shape {
  int rows, cols, stride;
};
const std::vector<Shape> kShapes = {{1, 1, 1}, {3, 5, 8}, {2, 1025, 1025}, {7, 300, 301}};

// Helpers that copy matrices between host and GPU and compare them.
class SmallKernels : public testing::Test {
 protected:
  std::vector<float> random(Shape s, float scale = 1) {
    std::normal_distribution<float> normal(0, scale);
    std::vector<float> v(static_cast<size_t>(s.rows) * s.stride);
    for (float& e : v) e = normal(rng_);
    return v;
  }
  std::vector<int32_t> random_ints(int n, int below) {
    std::uniform_int_distribution<int32_t> uniform(0, below - 1);
    std::vector<int32_t> v(n);
    for (int32_t& e : v) e = uniform(rng_);
    return v;
  }
  static Matrix matrix(const Buffer& b, Shape s) { return {b.as<float>(), s.stride}; }
  static Buffer nans(Shape s) { return nans_on_gpu<float>(int64_t{s.rows} * s.stride); }

  // The numbers of the shape are within `relative` of want(row, col); all others are unchanged.
  void expect(const Buffer& got, Shape s, const std::vector<float>& before, double relative,
              const std::function<double(int, int)>& want) {
    const std::vector<float> values = from_gpu<float>(stream_, got);
    for (int r = 0; r < s.rows; ++r) {
      for (int c = 0; c < s.cols; ++c) {
        const double w = want(r, c);
        ASSERT_LE(std::abs(values[r * s.stride + c] - w), relative * std::abs(w))
            << "row " << r << " column " << c << ": " << values[r * s.stride + c] << ", not " << w;
      }
      for (int c = s.cols; c < s.stride; ++c) {
        const float now = values[r * s.stride + c];
        ASSERT_TRUE(before.empty() ? std::isnan(now) : now == before[r * s.stride + c])
            << "column " << c << " is beyond the matrix";
      }
    }
  }

  std::mt19937 rng_{7};
  Stream stream_;
};

TEST_F(SmallKernels, RmsNorm) {
  for (const Shape s : {Shape{3, 7168, 7168}, {2, 64, 80}, {1, 5, 5}, {5, 1000, 1000}}) {
    const auto x = random(s, 3), gain = random({1, s.cols, s.cols});
    const Buffer dx = on_gpu(stream_, x), dgain = on_gpu(stream_, gain), out = nans(s);
    RmsNormArgs args = {.x = matrix(dx, s),
                        .gain = dgain.as<float>(),
                        .out = matrix(out, s),
                        .rows = s.rows,
                        .dim = s.cols,
                        .eps = 0.01f};
    rms_norm(stream_, args);
    args.out = args.x;
    rms_norm(stream_, args);
    const auto want = [&](int r, int c) {
      double squares = 0;
      for (int i = 0; i < s.cols; ++i) squares += std::pow(x[r * s.stride + i], 2);
      return x[r * s.stride + c] / std::sqrt(squares / s.cols + 0.01) * gain[c];
    };
    const auto each = [&](const Buffer& got, const std::vector<float>& before) {
      int row = -1;
      double scale = 0;  // scale of `row`
      expect(got, s, before, 1e-5, [&](int r, int c) {
        if (r != row) {
          row = r;
          scale = want(r, 0) / (double{x[r * s.stride]} * gain[0]);
        }
        return x[r * s.stride + c] * scale * gain[c];
      });
    };
    each(out, {});
    each(dx, x);
  }
}

TEST_F(SmallKernels, RmsNormOfASum) {
  for (const Shape s : {Shape{3, 1030, 1032}, {1, 5, 5}}) {
    const Shape o = {s.rows, s.cols, s.cols + 3};
    const auto x = random(s, 3), delta = random(o, 2), gain = random({1, s.cols, s.cols});
    const Buffer dx = on_gpu(stream_, x), ddelta = on_gpu(stream_, delta),
                 dgain = on_gpu(stream_, gain), out = nans(s), want = nans(s);
    const auto sum = [&](int r, int c) { return x[r * s.stride + c] + delta[r * o.stride + c]; };
    RmsNormArgs args = {.x = matrix(dx, s),
                        .gain = dgain.as<float>(),
                        .out = matrix(out, s),
                        .rows = s.rows,
                        .dim = s.cols,
                        .eps = 0.01f,
                        .delta = matrix(ddelta, o)};
    rms_norm(stream_, args);
    expect(dx, s, x, 0, sum);
    args.delta = {};
    args.out = matrix(want, s);
    rms_norm(stream_, args);  // of the sum
    const auto values = from_gpu<float>(stream_, want);
    expect(out, s, {}, 0, [&](int r, int c) { return values[r * s.stride + c]; });
  }
}

TEST_F(SmallKernels, EmbedWidensRows) {
  constexpr int kVocab = 11, kCols = 300, kStride = 304;
  const std::vector<int32_t> tokens = {10, 0, 3, 3, 7};
  const Shape s = {static_cast<int>(tokens.size()), kCols, kCols + 1};
  const Buffer dtokens = on_gpu(stream_, tokens);
  const auto f32 = random({kVocab, kCols, kStride});
  std::vector<bf16> b16;
  for (const float v : f32) b16.push_back(narrow(v));
  std::vector<fp8_e4m3> f8;
  for (const int32_t v : random_ints(kVocab * kStride, 0x7f))
    f8.push_back({static_cast<uint8_t>(v)});

  const auto run = [&](const auto& table, Number type, const auto& value) {
    const Buffer dtable = on_gpu(stream_, table), out = nans(s);
    embed(stream_, {.tokens = dtokens.as<int32_t>(),
                    .table = dtable.as<void>(),
                    .table_stride = kStride,
                    .type = type,
                    .out = matrix(out, s),
                    .rows = s.rows,
                    .cols = s.cols});
    expect(out, s, {}, 0, [&](int r, int c) { return value(table[tokens[r] * kStride + c]); });
  };
  run(f32, Number::kF32, [](float v) { return v; });
  run(b16, Number::kBF16, [](bf16 v) { return widen(v); });
  run(f8, Number::kF8E4M3, [](fp8_e4m3 v) { return widen(v); });
}

TEST_F(SmallKernels, Elementwise) {
  for (const Shape s : kShapes) {
    const Shape o = {s.rows, s.cols, s.cols + 3};
    const auto x = random(s, 20), other = random(o);
    const Buffer dother = on_gpu(stream_, other);
    const auto run = [&](auto verb, double relative, auto want) {
      const Buffer dx = on_gpu(stream_, x);
      verb(stream_, {matrix(dx, s), matrix(dother, o), s.rows, s.cols});
      expect(dx, s, x, relative,
             [&](int r, int c) { return want(x[r * s.stride + c], other[r * o.stride + c]); });
    };
    run(add, 0, [](float a, float b) { return a + b; });
    run(clear, 0, [](float, float) { return 0; });
    run(silu_mul, 1e-6, [](double a, double b) { return a / (1 + std::exp(-a)) * b; });
  }
}

TEST_F(SmallKernels, GatherRows) {
  for (const Shape s : kShapes) {
    const auto x = random(s);
    const std::vector<int32_t> rows = random_ints(9, s.rows);
    const Shape o = {9, s.cols, s.cols + 2};
    const Buffer dx = on_gpu(stream_, x), drows = on_gpu(stream_, rows), out = nans(o);
    gather_rows(stream_, {matrix(dx, s), drows.as<int32_t>(), matrix(out, o), o.rows, o.cols});
    expect(out, o, {}, 0, [&](int r, int c) { return x[rows[r] * s.stride + c]; });
  }
}

TEST_F(SmallKernels, RopeTurnsAdjacentPairs) {
  struct Case {
    std::vector<int32_t> positions;
    int heads, pairs, stride;
  };
  for (const auto& [positions, heads, pairs, stride] :
       {Case{{0, 3, 163839}, 5, 7, 20}, {{70000}, 128, 32, 192}, {{5, 4096}, 1, 1, 2}}) {
    SCOPED_TRACE(testing::Message() << heads << " heads of " << pairs << " pairs");
    const int tokens = static_cast<int>(positions.size());
    const Shape s = {tokens * heads, 2 * pairs, stride};
    const auto x = random(s);
    std::vector<float> frequencies;
    for (int i = 0; i < pairs; ++i)
      frequencies.push_back(std::pow(10000.f, -static_cast<float>(i) / static_cast<float>(pairs)));
    const Buffer dx = on_gpu(stream_, x), dpositions = on_gpu(stream_, positions),
                 dfrequencies = on_gpu(stream_, frequencies);
    rope(stream_, {.x = matrix(dx, s),
                   .positions = dpositions.as<int32_t>(),
                   .frequencies = dfrequencies.as<float>(),
                   .amplitude = 1.25f,
                   .tokens = tokens,
                   .rows_per_token = heads,
                   .n_pairs = pairs});
    const auto got = from_gpu<float>(stream_, dx);
    for (int r = 0; r < s.rows; ++r) {
      for (int i = 0; i < pairs; ++i) {
        // The angle is a product of floats, as in the checkpoints' own code.
        const float angle = static_cast<float>(positions[r / heads]) * frequencies[i];
        const double cos = 1.25 * std::cos(double{angle}), sin = 1.25 * std::sin(double{angle});
        const double a = x[r * s.stride + 2 * i], b = x[r * s.stride + 2 * i + 1];
        const double bound = 1e-6 * (std::abs(a) + std::abs(b));
        ASSERT_NEAR(got[r * s.stride + 2 * i], a * cos - b * sin, bound);
        ASSERT_NEAR(got[r * s.stride + 2 * i + 1], a * sin + b * cos, bound);
      }
      for (int c = s.cols; c < s.stride; ++c) ASSERT_EQ(got[r * s.stride + c], x[r * s.stride + c]);
    }
  }
}

// Against double precision, and rope() for the rotations.
TEST_F(SmallKernels, RotateAndAppend) {
  struct Case {
    int heads, rank, rope_dim;
    bool fp8;
  };
  const std::vector<int32_t> positions = {70000, 3, 163839}, rows = {4, 0, 2};
  const int tokens = 3, n_rows = 6;
  for (const auto& [heads, rank, rope_dim, fp8] : {Case{128, 512, 64, false},
                                                   {128, 512, 64, true},
                                                   {3, 40, 6, false},
                                                   {5, 130, 2, true},
                                                   {1, 600, 140, false}}) {
    SCOPED_TRACE(testing::Message() << heads << " heads, " << rank << " + " << rope_dim);
    const Shape q = {tokens * heads, rope_dim, rope_dim + 7};
    const Shape kv = {tokens, rank + rope_dim, rank + rope_dim + 1};
    const auto dq_before = random(q), dkv_before = random(kv, 3), gain = random({1, rank, rank});
    std::vector<float> frequencies;
    for (int i = 0; i < rope_dim / 2; ++i) frequencies.push_back(std::pow(0.7f, float(i)));
    const Buffer dq = on_gpu(stream_, dq_before), dkv = on_gpu(stream_, dkv_before),
                 dgain = on_gpu(stream_, gain), dpositions = on_gpu(stream_, positions),
                 drows = on_gpu(stream_, rows), dfrequencies = on_gpu(stream_, frequencies);
    const int64_t row_bytes = fp8 ? kFp8TokenBytes : (rank + rope_dim + 3) / 8 * 8 * 2 + 16;
    const Buffer cache = nans_on_gpu<uint8_t>(n_rows * row_bytes);
    rotate_and_append(stream_, {.q_rope = matrix(dq, q),
                                .kv = matrix(dkv, kv),
                                .gain = dgain.as<float>(),
                                .eps = 0.01f,
                                .positions = dpositions.as<int32_t>(),
                                .frequencies = dfrequencies.as<float>(),
                                .rows_of_cache = drows.as<int32_t>(),
                                .cache = cache.as<void>(),
                                .cache_stride = row_bytes / 2,
                                .fp8 = fp8,
                                .amplitude = 1.25f,
                                .tokens = tokens,
                                .n_heads = heads,
                                .kv_rank = rank,
                                .rope_dim = rope_dim});
    const auto turned = [&](const std::vector<float>& x, Shape s, int first, int per_token) {
      const Buffer at = on_gpu(stream_, x);
      rope(stream_, {.x = {at.as<float>() + first, s.stride},
                     .positions = dpositions.as<int32_t>(),
                     .frequencies = dfrequencies.as<float>(),
                     .amplitude = 1.25f,
                     .tokens = tokens,
                     .rows_per_token = per_token,
                     .n_pairs = rope_dim / 2});
      return from_gpu<float>(stream_, at);
    };
    EXPECT_EQ(from_gpu<float>(stream_, dq), turned(dq_before, q, 0, heads));
    EXPECT_EQ(from_gpu<float>(stream_, dkv), dkv_before);
    const auto keys = turned(dkv_before, kv, rank, 1);
    const auto got = from_gpu<uint8_t>(stream_, cache);
    std::vector<bool> written(n_rows);
    for (int t = 0; t < tokens; ++t) {
      written[rows[t]] = true;
      const uint8_t* row = &got[rows[t] * row_bytes];
      const auto* latents = reinterpret_cast<const bf16*>(row);
      const auto* scales = reinterpret_cast<const float*>(row + kMaxKvRank);
      const auto* key = fp8 ? reinterpret_cast<const bf16*>(scales + 4) : latents + rank;
      double squares = 0;
      for (int i = 0; i < rank; ++i) squares += std::pow(dkv_before[t * kv.stride + i], 2);
      for (int i = 0; i < (fp8 ? kMaxKvRank : rank); ++i) {
        const double want =
            i < rank ? dkv_before[t * kv.stride + i] / std::sqrt(squares / rank + 0.01) * gain[i]
                     : 0;
        const double value =
            fp8 ? widen(fp8_e4m3{row[i]}) * double{scales[i / 128]} : widen(latents[i]);
        // Half a step of BF16, or of E4M3, whose smallest is 2^-9.
        const double bound =
            fp8 ? std::abs(want) / 16 + scales[i / 128] * 0x1p-10 : std::abs(want) / 256;
        ASSERT_NEAR(value, want, bound * 1.001) << i;
      }
      for (int i = 0; i < rope_dim; ++i)
        ASSERT_EQ(key[i].bits, narrow(keys[t * kv.stride + rank + i]).bits) << i;
      for (int i = rope_dim; fp8 && i < 64; ++i) ASSERT_EQ(key[i].bits, 0);
      for (int64_t i = 2 * (rank + rope_dim); !fp8 && i < row_bytes; ++i) ASSERT_EQ(row[i], 0xff);
    }
    for (int64_t i = 0; i < std::ssize(got); ++i)
      EXPECT_TRUE(written[i / row_bytes] || got[i] == 0xff) << i;
  }
}

TEST_F(SmallKernels, AppendKvRoundsIntoItsRows) {
  struct Case {
    Shape kv;
    int cache_stride;
    std::vector<int32_t> rows;
  };
  for (const auto& [s, cache_stride, rows] : {Case{{3, 72, 80}, 80, {65, 0, 7}},
                                              {{1, 3, 3}, 8, {127}},
                                              {{5, 576, 601}, 584, {1, 126, 63, 64, 2}}}) {
    SCOPED_TRACE(testing::Message() << s.rows << " rows of " << s.cols);
    const auto kv = random(s);
    const Buffer dkv = on_gpu(stream_, kv), drows = on_gpu(stream_, rows);
    const Buffer cache = nans_on_gpu<bf16>(int64_t{128} * cache_stride);
    append_kv(stream_, {matrix(dkv, s), drows.as<int32_t>(), cache.as<bf16>(), cache_stride, s.rows,
                        s.cols});
    std::vector<bf16> want(128 * cache_stride, bf16{0xffff});
    for (int t = 0; t < s.rows; ++t)
      for (int c = 0; c < s.cols; ++c)
        want[rows[t] * cache_stride + c] = narrow(kv[t * s.stride + c]);
    const auto got = from_gpu<bf16>(stream_, cache);
    for (size_t i = 0; i < want.size(); ++i) ASSERT_EQ(got[i].bits, want[i].bits) << i;
  }
}

TEST_F(SmallKernels, SortPairsGroupsByExpert) {
  struct Case {
    int tokens, n_active, n_experts;
  };
  for (const auto& [tokens, n_active, n_experts] :
       {Case{1, 8, 256}, {7, 3, 5}, {600, 8, 64}, {2, 1, 1}, {33, 2, 384}}) {
    const int pairs = tokens * n_active, stride = n_active + 1;
    auto ids = random_ints(tokens * stride, n_experts);
    for (size_t i = 0; i < ids.size(); i += 5) ids[i] = -1;  // entries to be skipped
    const Buffer dids = on_gpu(stream_, ids), offsets = nans_on_gpu<int32_t>(n_experts + 1),
                 row_of = nans_on_gpu<int32_t>(pairs), tokens_of = nans_on_gpu<int32_t>(pairs);
    sort_pairs(stream_, {.ids = dids.as<int32_t>(),
                         .ids_stride = stride,
                         .offsets = offsets.as<int32_t>(),
                         .row_of = row_of.as<int32_t>(),
                         .tokens_of_rows = tokens_of.as<int32_t>(),
                         .tokens = tokens,
                         .n_active = n_active,
                         .n_experts = n_experts});
    std::vector<int32_t> want_offsets = {0}, want_row_of(pairs, -1), want_tokens;
    for (int e = 0; e < n_experts; ++e) {
      for (int pair = 0; pair < pairs; ++pair) {
        if (ids[pair / n_active * stride + pair % n_active] != e) continue;
        want_row_of[pair] = static_cast<int32_t>(want_tokens.size());
        want_tokens.push_back(pair / n_active);
      }
      want_offsets.push_back(static_cast<int32_t>(want_tokens.size()));
    }
    EXPECT_EQ(from_gpu<int32_t>(stream_, offsets), want_offsets);
    EXPECT_EQ(from_gpu<int32_t>(stream_, row_of), want_row_of);
    auto got_tokens = from_gpu<int32_t>(stream_, tokens_of);
    got_tokens.resize(want_tokens.size());
    EXPECT_EQ(got_tokens, want_tokens);
  }
}

TEST_F(SmallKernels, NothingIsDoneForNoRows) {
  add(stream_, {});
  clear(stream_, {});
  silu_mul(stream_, {});
  rms_norm(stream_, {});
  gather_rows(stream_, {});
  embed(stream_, {});
  rope(stream_, {});
  append_kv(stream_, {});
  sort_pairs(stream_, {});
  route(stream_, {});
  append_fp8(stream_, {});
  rotate_and_append(stream_, {});
  combine_experts(stream_, {});
  plain_product(stream_, {});
  plain_experts(stream_, {});
  plain_attention(stream_, {});
  MlaDecodeArgs decode = {};
  decode.cache.kv_rank = decode.cache.rope_dim = 2;
  mla_decode(stream_, decode);
  DrawArgs drawing = {};
  drawing.vocab = 1;
  draw(stream_, drawing);
  stream_.wait();
}

}  // namespace
}  // namespace tandem::gpu
