// The work of decode attention grows with the length of the sequence, not with the maximum length,
// and tokens of a sequence that fit a block's rows share what they read. Counted, which is possible
// on the emulated GPU only.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <numeric>
#include <random>

#include "gpu_kernels/attention/attention.h"
#include "gpu_kernels/emulated/emulator.h"
#include "tests/gpu_buffers.h"

namespace tandem::gpu::test {
namespace {

constexpr int kDecodeHeads = 16, kRank = 512, kRope = 64, kStride = kRank + kRope;
constexpr int kMaxLength = 4096, kMaxTokens = 5;

struct Work {
  int64_t copies;       // copies of 16 bytes from the cache
  int64_t collectives;  // warp collectives: mma, ldmatrix, shuffles
};

// Decode attention for some tokens of one sequence, with page tables for `longest` tokens.
class Decode {
 public:
  explicit Decode(bool fp8) : fp8_(fp8) {
    std::mt19937 rng(1);
    const std::vector<uint8_t> bytes(kMaxLength * token_bytes(), 0x38);  // numbers near 1
    cache_ = std::make_unique<OnGpuBuffer<uint8_t>>(stream_, bytes);
    q_ = std::make_unique<OnGpuBuffer<float>>(
        stream_, random_floats(rng, kMaxTokens * kDecodeHeads * kStride, 1));
  }

  Work of(int length, int longest, int n_splits, int n_tokens = 1) {
    const int n_rows = n_tokens * kDecodeHeads;
    std::vector<int32_t> page_list(longest / kPageTokens);
    std::iota(page_list.begin(), page_list.end(), 0);
    const OnGpuBuffer<int32_t> count(stream_, std::vector<int32_t>{n_tokens}),
        first(stream_, std::vector<int32_t>{0}), kv(stream_, std::vector<int32_t>{length}),
        pages(stream_, page_list);
    const OnGpuBuffer<float> partial(int64_t{n_splits} * n_rows * kMaxKvRank),
        lse(n_splits * n_rows), out(n_rows * kRank);
    const emulated::Counts& counts = emulated::counts();
    const int64_t copies = counts.copies, collectives = counts.collectives;
    mla_decode(stream_, {.q = q_->data(),
                         .q_rope = q_->data() + kRank,
                         .cache = {cache_->data(), kStride, kRank, kRope, fp8_},
                         .sequences = {.first_token = first.data(),
                                       .n_tokens = count.data(),
                                       .kv_length = kv.data(),
                                       .pages = pages.data(),
                                       .n = 1,
                                       .max_pages = static_cast<int>(page_list.size()),
                                       .max_tokens = n_tokens},
                         .partial = partial.data(),
                         .partial_lse = lse.data(),
                         .out = out.data(),
                         .q_stride = kStride,
                         .q_rope_stride = kStride,
                         .out_stride = kRank,
                         .n_rows = n_rows,
                         .n_heads = kDecodeHeads,
                         .n_splits = n_splits,
                         .softmax_scale = 0.01f});
    for (const float v : out.values(stream_)) EXPECT_TRUE(std::isfinite(v));
    return {counts.copies - copies, counts.collectives - collectives};
  }
  // The number of copies that the cached numbers of `length` tokens need.
  int64_t copies_of(int length) const {
    return length * (fp8_ ? kFp8TokenBytes / 16 : kStride / 8);
  }

 private:
  int64_t token_bytes() const { return fp8_ ? kFp8TokenBytes : kStride * 2; }

  const bool fp8_;
  Stream stream_;
  std::unique_ptr<OnGpuBuffer<uint8_t>> cache_;
  std::unique_ptr<OnGpuBuffer<float>> q_;
};

TEST(DecodeCost, GrowsWithTheContextNotWithItsMaximum) {
  constexpr int kSplits = 4;
  for (const bool fp8 : {false, true}) {
    SCOPED_TRACE(fp8 ? "FP8" : "BF16");
    Decode decode(fp8);
    const Work one = decode.of(64, 64, kSplits), same = decode.of(64, kMaxLength, kSplits),
               all = decode.of(kMaxLength, kMaxLength, kSplits);
    EXPECT_EQ(one.copies, decode.copies_of(64));
    EXPECT_EQ(all.copies, decode.copies_of(kMaxLength));
    EXPECT_EQ(same.copies, one.copies);
    EXPECT_EQ(same.collectives, one.collectives);
    const double ratio = static_cast<double>(all.collectives) / same.collectives;
    EXPECT_GT(ratio, 0.8 * kMaxLength / 64);
    EXPECT_LT(ratio, 1.2 * kMaxLength / 64);
  }
}

// A block has 64 rows: up to 4 tokens of 16 heads read the cache once, 5 twice.
TEST(DecodeCost, TokensOfASequenceShareTheCacheThatTheyRead) {
  constexpr int kSplits = 4, kLength = 1024;
  for (const bool fp8 : {false, true}) {
    SCOPED_TRACE(fp8 ? "FP8" : "BF16");
    Decode decode(fp8);
    for (const int n_tokens : {1, 2, 3, 4})
      EXPECT_EQ(decode.of(kLength, kLength, kSplits, n_tokens).copies, decode.copies_of(kLength))
          << n_tokens;
    EXPECT_EQ(decode.of(kLength, kLength, kSplits, kMaxTokens).copies,
              2 * decode.copies_of(kLength));
  }
}

}  // namespace
}  // namespace tandem::gpu::test
