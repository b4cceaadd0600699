// Attention on the GPU against double precision: shuffled pages, ragged batches, every type of
// cache, and NaN in every output and in everything that no token may see.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>

#include "gpu_kernels/attention/attention.h"
#include "tests/check_close.h"
#include "tests/gpu_weights.h"

namespace tandem::gpu::test {
namespace {

using tandem::test::expect_close;

struct Length {
  int n_tokens, kv_length;  // new tokens of a sequence, and all its tokens
};

struct CacheShape {
  int kv_rank, rope_dim;
  bool fp8 = false, integers = false;  // integers: latents are from -2 to 2
  int dim() const { return kv_rank + rope_dim; }
};

// Sequences with interleaved pages. Unused rows and the space between rows are NaN.
class RandomCache {
 public:
  RandomCache(Stream& stream, std::mt19937& rng, const CacheShape& shape,
              const std::vector<Length>& lengths)
      : shape_(shape), stride_(shape.fp8 ? 0 : (shape.dim() + 7) / 8 * 8 + 8) {
    for (const Length& l : lengths)
      max_pages_ = std::max(max_pages_, (l.kv_length + kPageTokens - 1) / kPageTokens + 1);
    pages_.resize(lengths.size() * max_pages_);
    std::iota(pages_.begin(), pages_.end(), 0);
    std::shuffle(pages_.begin(), pages_.end(), rng);
    const int64_t token_bytes = shape.fp8 ? kFp8TokenBytes : stride_ * 2;
    bytes_.assign(pages_.size() * kPageTokens * token_bytes, 0xff);
    values_.resize(pages_.size() * kPageTokens * shape.dim(), NAN);
    for (size_t s = 0; s < lengths.size(); ++s)
      for (int t = 0; t < lengths[s].kv_length; ++t) {
        const int64_t row = row_of(s, t);
        fill_row(rng, bytes_.data() + row * token_bytes, &values_[row * shape.dim()]);
      }
    for (size_t i = 0; i < pages_.size(); ++i)  // page numbers beyond a sequence are invalid
      if (static_cast<int>(i % max_pages_) * kPageTokens >= lengths[i / max_pages_].kv_length)
        pages_[i] = 1 << 28;
    on_gpu_ = std::make_unique<OnGpuBuffer<uint8_t>>(stream, bytes_);
    pages_on_gpu_ = std::make_unique<OnGpuBuffer<int32_t>>(stream, pages_);
  }

  const float* row(size_t sequence, int token) const {
    return &values_[row_of(sequence, token) * shape_.dim()];
  }
  LatentCache view() const {
    return {on_gpu_->data(), stride_, shape_.kv_rank, shape_.rope_dim, shape_.fp8};
  }
  const int32_t* pages() const { return pages_on_gpu_->data(); }
  int max_pages() const { return max_pages_; }

 private:
  int64_t row_of(size_t sequence, int token) const {
    return int64_t{pages_[sequence * max_pages_ + token / kPageTokens]} * kPageTokens +
           token % kPageTokens;
  }

  void fill_row(std::mt19937& rng, uint8_t* row, float* values) {
    std::normal_distribution<float> normal(0, 1);
    const auto store_bf16 = [&](int column, uint8_t* to) {
      const bool integer = shape_.integers && column < shape_.kv_rank;
      const bf16 v = narrow(integer ? float(static_cast<int>(rng() % 5) - 2) : normal(rng));
      std::memcpy(to, &v, 2);
      values[column] = widen(v);
    };
    const int latent = shape_.fp8 ? 0 : shape_.kv_rank;
    if (shape_.fp8) std::memset(row, 0, kFp8TokenBytes);
    for (int i = 0; i < latent; ++i) store_bf16(i, row + 2 * i);
    for (int i = 0; i < shape_.kv_rank - latent; ++i) {
      const auto code = static_cast<uint8_t>(rng() & 0xff);
      row[i] = (code & 0x7f) == 0x7f ? 0 : code;
      if (shape_.integers) row[i] = rng() % 2 ? 0x38 : 0xb8;  // codes of 1 and -1
      const float scale = shape_.integers ? 1 + i / 128 : 0.002f * (1 + i / 128);
      std::memcpy(row + kMaxKvRank + i / 128 * 4, &scale, 4);
      values[i] = widen(narrow(widen(fp8_e4m3{row[i]}) * scale));
    }
    uint8_t* const rope = row + (shape_.fp8 ? kMaxKvRank + 16 : 2 * shape_.kv_rank);
    for (int i = 0; i < shape_.rope_dim; ++i) store_bf16(shape_.kv_rank + i, rope + 2 * i);
  }

  CacheShape shape_;
  int64_t stride_;
  int max_pages_ = 0;
  std::vector<int32_t> pages_;
  std::vector<uint8_t> bytes_;
  std::vector<float> values_;
  std::unique_ptr<OnGpuBuffer<uint8_t>> on_gpu_;
  std::unique_ptr<OnGpuBuffer<int32_t>> pages_on_gpu_;
};

// Softmax over scores, and the sum of the values in rows `value(t)`. Weights are rounded to BF16
// (an error of at most 2^-8 each). Scores have errors of score_error, which changes every weight by
// that factor.
struct Attended {
  std::vector<double> values, bounds;

  template <class Value>
  void add(const std::vector<double>& scores, double score_error, int dim, const Value& value) {
    const double max = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (double s : scores) sum += std::exp(s - max);
    std::vector<double> out(dim), size(dim);
    for (size_t t = 0; t < scores.size(); ++t) {
      const double weight = std::exp(scores[t] - max) / sum;
      for (int i = 0; i < dim; ++i) {
        out[i] += weight * value(t)[i];
        size[i] += weight * std::abs(value(t)[i]);
      }
    }
    for (int i = 0; i < dim; ++i) {
      values.push_back(out[i]);
      bounds.push_back(size[i] * (1.02 / 256 + 3 * score_error) + 1e-6);
    }
  }
};

// Rows before `first` and the space between rows must still be NaN.
void expect_untouched(const std::vector<float>& out, int64_t stride, int64_t cols, int64_t first) {
  for (int64_t i = 0; i < std::ssize(out); ++i) {
    const bool ours = i / stride >= first && i % stride < cols;
    ASSERT_TRUE(ours || std::isnan(out[i]))
        << "written: column " << i % stride << " of row " << i / stride;
  }
}

class GpuAttention : public ::testing::Test {
 protected:
  void decode(const CacheShape& shape, int heads, const std::vector<Length>& lengths, int n_splits,
              float scale = 0.1f, bool joins = false);
  // The same where a product joins the splits. At most kJoinTokens tokens.
  void decode_and_join(const CacheShape& shape, int heads, const std::vector<Length>& lengths,
                       int n_splits) {
    decode(shape, heads, lengths, n_splits, 0.1f, true);
  }
  void multiply_by_one(const MlaDecodeArgs& args, int n_tokens);

  void prefill(const CacheShape& shape, int heads, int nope, int v, const Length& length,
               const PrefillPlan& plan);

  Stream stream_;
  std::mt19937 rng_{3};
};

// Joins the rows of all tokens but the first by a product with the identity matrix.
void GpuAttention::multiply_by_one(const MlaDecodeArgs& a, int n_tokens) {
  const int rank = a.cache.kv_rank, stride = (rank + 15) / 16 * 16;
  const bool fp8 = a.cache.fp8;
  std::vector<uint8_t> codes(int64_t{rank} * stride, 0);
  std::vector<bf16> numbers(codes.size());
  for (int i = 0; i < rank; ++i) {
    codes[i * (int64_t{stride} + 1)] = 0x38;
    numbers[i * (int64_t{stride} + 1)] = narrow(1);
  }
  const OnGpuBuffer<uint8_t> codes_on_gpu(stream_, codes);
  const OnGpuBuffer<bf16> numbers_on_gpu(stream_, numbers);
  const OnGpuBuffer<float> scales(stream_, std::vector<float>(16, 1.f));
  per_head_product(stream_, {.x = a.out + a.n_heads * a.out_stride,
                             .w = {.data = fp8 ? static_cast<const void*>(codes_on_gpu.data())
                                               : numbers_on_gpu.data(),
                                   .stride = stride,
                                   .type = fp8 ? Number::kF8E4M3 : Number::kBF16,
                                   .rows = rank,
                                   .cols = rank,
                                   .scale = scales.data(),
                                   .scale_stride = 4},
                             .out = a.out + a.n_heads * a.out_stride,
                             .x_stride = a.out_stride,
                             .out_stride = a.out_stride,
                             .n_tokens = n_tokens,
                             .n_heads = a.n_heads,
                             .x_cols = rank,
                             .out_cols = rank,
                             .first_row = 0,
                             .rows_per_head = 0,
                             .transposed = false,
                             .parts = attention_parts(a, a.n_heads)});
}

void GpuAttention::decode(const CacheShape& shape, int heads, const std::vector<Length>& lengths,
                          int n_splits, float scale, bool joins) {
  SCOPED_TRACE(testing::Message() << "rank " << shape.kv_rank << ", " << heads << " heads, "
                                  << n_splits << " splits");
  const RandomCache cache(stream_, rng_, shape, lengths);
  std::vector<int32_t> first, n_tokens, kv_length;
  int tokens = 1;  // the first token belongs to no sequence
  for (const Length& l : lengths) {
    first.push_back(tokens);
    n_tokens.push_back(l.n_tokens);
    kv_length.push_back(l.kv_length);
    tokens += l.n_tokens;
  }
  const int rows = tokens * heads;
  const Rows q(rng_, rows, shape.kv_rank, 1, 2), q_rope(rng_, rows, shape.rope_dim, 1, 4);
  const int64_t out_stride = shape.kv_rank + 2;
  const OnGpuBuffer<float> q_on_gpu(stream_, q.values), rope_on_gpu(stream_, q_rope.values);
  const OnGpuBuffer<float> partial(int64_t{n_splits} * rows * kMaxKvRank), lse(n_splits * rows);
  const OnGpuBuffer<float> out(rows * out_stride);
  const OnGpuBuffer<int32_t> firsts(stream_, first), ns(stream_, n_tokens), kv(stream_, kv_length);
  const MlaDecodeArgs args = {
      .q = q_on_gpu.data(),
      .q_rope = rope_on_gpu.data(),
      .cache = cache.view(),
      .sequences = {.first_token = firsts.data(),
                    .n_tokens = ns.data(),
                    .kv_length = kv.data(),
                    .pages = cache.pages(),
                    .n = static_cast<int>(lengths.size()),
                    .max_pages = cache.max_pages(),
                    .max_tokens = *std::max_element(n_tokens.begin(), n_tokens.end()) + 1},
      .partial = partial.data(),
      .partial_lse = lse.data(),
      .out = out.data(),
      .q_stride = q.stride,
      .q_rope_stride = q_rope.stride,
      .out_stride = out_stride,
      .n_rows = rows,
      .n_heads = heads,
      .n_splits = n_splits,
      .softmax_scale = scale,
      .combines = !joins};
  mla_decode(stream_, args);
  if (joins) multiply_by_one(args, tokens - 1);
  const std::vector<float> all = out.values(stream_);
  Attended want;
  std::vector<float> got;
  for (size_t s = 0; s < lengths.size(); ++s)
    for (int r = 0; r < lengths[s].n_tokens * heads; ++r) {
      const int row = first[s] * heads + r;
      const int visible = lengths[s].kv_length - lengths[s].n_tokens + 1 + r / heads;
      std::vector<double> scores(visible);
      double size = 0;
      for (int t = 0; t < visible; ++t) {
        const float* key = cache.row(s, t);
        double dot = 0, magnitude = 0;
        for (int i = 0; i < shape.dim(); ++i) {
          const float v = i < shape.kv_rank ? q.at(row, i) : q_rope.at(row, i - shape.kv_rank);
          dot += rounded(v) * key[i];
          magnitude += std::abs(rounded(v) * key[i]);
        }
        scores[t] = dot * scale;
        size = std::max(size, magnitude * scale);
      }
      want.add(scores, size * 60 * std::exp2(-23), shape.kv_rank,
               [&](size_t t) { return cache.row(s, static_cast<int>(t)); });
      got.insert(got.end(), all.begin() + row * out_stride,
                 all.begin() + row * out_stride + shape.kv_rank);
    }
  if (joins)  // the product rounds to BF16
    for (size_t i = 0; i < want.values.size(); ++i)
      want.bounds[i] += std::abs(want.values[i]) / 256;
  expect_close(got, want.values, want.bounds);
  expect_untouched(all, out_stride, shape.kv_rank, heads);
}

TEST_F(GpuAttention, Decode) {
  decode({512, 64}, 3, {{1, 1}}, 1);
  decode({512, 64}, 128, {{1, 70}}, 1);
  decode({512, 64}, 16, {{1, 300}, {0, 0}, {2, 17}, {5, 129}}, 2);
}
TEST_F(GpuAttention, DecodeMergesShares) {
  decode({512, 64}, 5, {{1, 600}, {1, 128}, {1, 129}, {3, 384}}, 4);
  decode({128, 16}, 70, {{2, 1000}}, 3);
}
TEST_F(GpuAttention, DecodeOfOtherDimensions) {
  decode({32, 8}, 4, {{1, 65}, {4, 4}}, 1);
  decode({130, 16}, 2, {{3, 80}}, 1);
  decode({140, 32}, 7, {{1, 200}}, 2);
  decode({8, 8}, 3, {{20, 33}}, 1);
}
TEST_F(GpuAttention, DecodeCombinesManySplits) {
  decode({32, 8}, 2, {{1, 70 * 128}, {1, 300}, {1, 5}}, 75);
  decode({510, 64}, 1, {{1, 36 * 128 + 1}}, 40);
}
TEST_F(GpuAttention, TheProductJoinsSplits) {
  decode_and_join({512, 64}, 5, {{1, 600}}, 4);
  decode_and_join({512, 64, true}, 3, {{2, 300}, {1, 5}, {1, 1000}}, 7);
  decode_and_join({130, 16, true}, 2, {{4, 520}}, 5);
  decode_and_join({32, 8}, 2, {{1, 70 * 128}, {1, 300}, {2, 5}}, 75);
  decode_and_join({30, 8}, 3, {{1, 24 * 128}, {1, 25 * 128}}, 25);
}
TEST_F(GpuAttention, DecodeOfSeveralTokensFillsRows) {
  decode({64, 16}, 16, {{9, 150}, {1, 64}}, 2);
}
TEST_F(GpuAttention, DecodeWithLargeScores) {
  decode({512, 64}, 4, {{2, 100}}, 1, 3.f);
  decode({512, 64}, 4, {{2, 300}}, 2, 1e-6f);
}
TEST_F(GpuAttention, DecodeFp8) {
  decode({512, 64, true}, 16, {{1, 1}, {2, 300}, {1, 64}}, 2);
  decode({512, 64, true}, 70, {{1, 33}}, 1);
  decode({130, 16, true}, 3, {{2, 70}}, 1);
}

// With integer latents and integer kv_b the restored numbers are exact, and so is their rounding to
// BF16.
void GpuAttention::prefill(const CacheShape& shape, int heads, int nope, int v_dim,
                           const Length& length, const PrefillPlan& plan) {
  SCOPED_TRACE(testing::Message() << "rank " << shape.kv_rank << ", " << heads << " heads, "
                                  << length.n_tokens << " of " << length.kv_length << ", "
                                  << plan.heads << " heads and " << plan.keys << " keys");
  const int head_dim = nope + v_dim, rows = length.n_tokens * heads;
  const RandomCache cache(stream_, rng_, shape, {length});
  const RandomWeight kv_b(
      stream_, rng_,
      {.rows = heads * head_dim, .cols = shape.kv_rank, .type = Number::kF8E4M3, .integers = true});
  const Rows q(rng_, rows, nope, 1, 3), q_rope(rng_, rows, shape.rope_dim, 1, 1);
  const int64_t out_stride = v_dim + 1, latent_stride = (shape.kv_rank + 15) / 16 * 16;
  const OnGpuBuffer<float> q_on_gpu(stream_, q.values), rope_on_gpu(stream_, q_rope.values);
  const OnGpuBuffer<float> out(rows * out_stride);
  const OnGpuBuffer<bf16> latents(length.kv_length * latent_stride);
  const OnGpuBuffer<bf16> restored(int64_t{std::min(plan.keys, length.kv_length)} * plan.heads *
                                   head_dim);
  const OnGpuBuffer<float> carried(2 * rows);
  const float scale = 0.05f / std::sqrt(1.f * shape.kv_rank * (nope + shape.rope_dim));
  mla_prefill(stream_, {.q = q_on_gpu.data(),
                        .q_rope = rope_on_gpu.data(),
                        .cache = cache.view(),
                        .pages = cache.pages(),
                        .kv_b = kv_b.view(),
                        .latents = latents.data(),
                        .restored = restored.data(),
                        .carried = plan.keys < length.kv_length ? carried.data() : nullptr,
                        .out = out.data(),
                        .q_stride = q.stride,
                        .q_rope_stride = q_rope.stride,
                        .out_stride = out_stride,
                        .n_tokens = length.n_tokens,
                        .kv_length = length.kv_length,
                        .n_heads = heads,
                        .nope_dim = nope,
                        .v_dim = v_dim,
                        .plan = plan,
                        .softmax_scale = scale});
  const std::vector<float> all = out.values(stream_);
  Attended want;
  std::vector<float> got;
  for (int h = 0; h < heads; ++h) {
    std::vector<double> both(int64_t{length.kv_length} * head_dim);  // restored keys and values
    for (int t = 0; t < length.kv_length; ++t)
      for (int i = 0; i < head_dim; ++i) {
        double sum = 0;
        for (int k = 0; k < shape.kv_rank; ++k)
          sum += cache.row(0, t)[k] * kv_b.at(h * head_dim + i, k);
        both[t * head_dim + i] = rounded(static_cast<float>(sum));
      }
    for (int token = 0; token < length.n_tokens; ++token) {
      const int row = token * heads + h, visible = length.kv_length - length.n_tokens + 1 + token;
      std::vector<double> scores(visible);
      double size = 0;
      for (int t = 0; t < visible; ++t) {
        double dot = 0, magnitude = 0;
        for (int i = 0; i < nope + shape.rope_dim; ++i) {
          const double product = i < nope ? rounded(q.at(row, i)) * both[t * head_dim + i]
                                          : rounded(q_rope.at(row, i - nope)) *
                                                cache.row(0, t)[shape.kv_rank + i - nope];
          dot += product;
          magnitude += std::abs(product);
        }
        scores[t] = dot * scale;
        size = std::max(size, magnitude * scale);
      }
      want.add(scores, size * 60 * std::exp2(-23), v_dim,
               [&](size_t t) { return &both[t * head_dim + nope]; });
      got.insert(got.end(), all.begin() + row * out_stride, all.begin() + row * out_stride + v_dim);
    }
  }
  expect_close(got, want.values, want.bounds);
  expect_untouched(all, out_stride, v_dim, 0);
}

TEST_F(GpuAttention, Prefill) {
  prefill({512, 64, false, true}, 3, 128, 128, {70, 70}, {2, 70});
  prefill({512, 64, true, true}, 2, 128, 128, {30, 130}, {2, 130});
}
TEST_F(GpuAttention, PrefillBehindPages) {
  prefill({64, 16, false, true}, 2, 32, 40, {150, 333}, {1, 333});
}
// Tokens that end before a piece, in it and behind it; rows whose first keys are in a later tile.
TEST_F(GpuAttention, PrefillInPieces) {
  prefill({64, 16, false, true}, 2, 32, 40, {150, 333}, {2, 128});
  prefill({64, 16, false, true}, 3, 32, 40, {300, 300}, {2, 64});
  prefill({512, 64, true, true}, 2, 128, 128, {30, 130}, {1, 64});
  prefill({130, 16, false, true}, 3, 24, 24, {129, 129}, {3, 128});
}
TEST_F(GpuAttention, PrefillOfOtherDimensions) {
  prefill({32, 8, false, true}, 4, 16, 16, {33, 40}, {3, 64});
  prefill({130, 16, false, true}, 3, 24, 24, {20, 90}, {3, 128});
  prefill({8, 8, false, true}, 5, 4, 4, {17, 65}, {2, 65});
  prefill({140, 32, false, true}, 1, 16, 40, {1, 64}, {1, 64});
}

// R1's sequences with 8,192 tokens, and the share of all waves' time in which blocks read tiles, a
// block's queries and results counted as 12. With whole multiprocessors over blocks the median was
// 0.73, 0.74 and 0.69, and the least of more than 32 sequences 0.5.
TEST(DecodeSplits, FillTheGpu) {
  for (const int n_multiprocessors : {128, 132, 170}) {
    std::vector<double> shares;
    for (int n = 1; n <= 132; ++n) {
      const int splits = mla_decode_splits(n, 1, 128, n_multiprocessors, 1000);
      const double blocks = 2. * n * splits;
      EXPECT_LE(splits, std::max(n_multiprocessors / (2 * n), 16));
      const double waves = std::ceil(blocks / n_multiprocessors);
      const double tiles = std::max(512. / splits, 8.);
      shares.push_back(2 * n * 512. / n_multiprocessors / (waves * (tiles + 12)));
      if (n > 32) {
        EXPECT_GE(shares.back(), 0.7) << n << " sequences on " << n_multiprocessors;
      }
    }
    std::nth_element(shares.begin(), shares.begin() + 66, shares.end());
    EXPECT_GE(shares[66], 0.82) << n_multiprocessors;
  }
  EXPECT_EQ(mla_decode_splits(1, 1, 128, 132, 1000), 66);
  EXPECT_EQ(mla_decode_splits(1, 1, 16, 132, 1000), 132);
  EXPECT_EQ(mla_decode_splits(66, 1, 128, 132, 1000), 1) << "one wave";
  EXPECT_EQ(mla_decode_splits(1, 1, 128, 132, 50), 50);
  EXPECT_GT(mla_decode_splits(64, 1, 128, 170, 1000), 2);
  EXPECT_EQ(mla_decode_splits(64, 1, 128, 170, 2), 1) << "two splits are slower than one";
  EXPECT_EQ(mla_decode_splits(3, 1, 128, 2, 1000), 1) << "three waves";
}

// R1 on 132 multiprocessors, with scratch for 4,096 tokens of all heads. The share of the blocks'
// places that are filled, counting every launch as whole waves; before, heads were divided by the
// longest context that is possible.
TEST(PrefillPlans, FillTheGpu) {
  constexpr int kHeads = 128, kGpu = 132;
  constexpr int64_t kCapacity = 4096 * kHeads;
  for (const int n_tokens : {512, 2048})
    for (const int kv_length : {512, 2048, 4096, 65536, 163840}) {
      if (kv_length < n_tokens) continue;
      const PrefillPlan plan = mla_prefill_plan({n_tokens, kv_length, kHeads, kCapacity, kGpu});
      SCOPED_TRACE(testing::Message() << n_tokens << " tokens of " << kv_length << ": "
                                      << plan.heads << " heads, " << plan.keys << " keys");
      EXPECT_LE(int64_t{plan.heads} * std::min(plan.keys, kv_length), kCapacity);
      EXPECT_TRUE(plan.keys >= kv_length || plan.keys % kPrefillKeys == 0);
      int64_t waves = 0;
      for (int head = 0; head < kHeads; head += plan.heads)
        waves += (std::min(plan.heads, kHeads - head) * n_tokens / 128 + kGpu - 1) / kGpu;
      const double share = kHeads * n_tokens / 128. / static_cast<double>(waves * kGpu);
      EXPECT_GE(share, 0.9);
    }
  const PrefillPlan tiny = mla_prefill_plan({1, 1000, 16, kPrefillKeys, kGpu});
  EXPECT_EQ(tiny.heads, 1);
  EXPECT_EQ(tiny.keys, kPrefillKeys);
}

}  // namespace
}  // namespace tandem::gpu::test
