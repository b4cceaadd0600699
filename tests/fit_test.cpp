// What fits a GPU and its host, with round numbers of bytes.
#include "offload/parts/fit.h"

#include <gtest/gtest.h>

#include "model/kv_layout.h"
#include "tests/planner_cases.h"

namespace tandem {
namespace {

constexpr int64_t kExpert = 1'000'000, kBackbone = 50'000'000, kScratch = 3'000'000;
constexpr int64_t kEmbedding = 7'000'000, kHybrid = 2'000'000;

int64_t n_on_gpu(const GpuParts& parts) {
  int64_t n = 0;
  for (const auto& layer : parts.experts) n += std::count(layer.begin(), layer.end(), true);
  return n;
}

class Fit : public ::testing::Test {
 protected:
  const ModelConfig config_ = known_model("v2-lite");
  const int64_t n_experts_ = 26 * 64;
  const int64_t token_ = kv_bytes_per_token(config_, DType::kBF16);
  FitRequest request_ = {.config = config_,
                         .context = 10 * kPageSize,
                         .kv_fraction = 0,
                         .max_kv_tokens = 0,
                         .kv_type = DType::kBF16,
                         .experts = {}};
  GpuMemory gpu_ = {
      .name = "a GPU",
      .free_bytes = 0,
      .expert_bytes = kExpert,
      .streams = true,
      .weight_bytes =
          [](const GpuParts& p) {
            return kBackbone + (p.embedding_on_cpu ? 0 : kEmbedding) + n_on_gpu(p) * kExpert;
          },
      .other_bytes =
          [this](const GpuParts& p, int64_t context, int64_t kv_tokens) {
            return kScratch + context + kv_tokens * token_ + (all_on_gpu(p) ? 0 : kHybrid);
          }};
  HostMemory host_ = {
      .capacity_bytes = int64_t{1} << 40, .bytes = [](const ExpertsLayout& e) {
        const auto& format = e.format(1);
        const int64_t whole = 64'000'000'000;
        return !format ? whole : format->dtype == DType::kI8 ? whole / 2 : whole / 4;
      }};
  // Bytes of everything on the GPU with one sequence.
  int64_t whole() const {
    return kBackbone + kEmbedding + n_experts_ * kExpert + kScratch +
           request_.context * (1 + token_);
  }
  GpuShare fitted(int64_t free_bytes) {
    gpu_.free_bytes = free_bytes;
    return fit_gpu(request_, gpu_);
  }
};

TEST_F(Fit, TheWholeModelGoesToAGpuThatHoldsIt) {
  const GpuShare share = fitted(whole());
  EXPECT_TRUE(all_on_gpu(share.parts));
  EXPECT_EQ(share.parts.stream_from_tokens, 0);
  EXPECT_FALSE(share.parts.embedding_on_cpu);
  EXPECT_EQ(share.kv_tokens, request_.context);
}

TEST_F(Fit, OneByteLessLeavesExpertsToTheCpu) {
  const GpuParts parts = fitted(whole() - 1).parts;
  EXPECT_EQ(n_on_gpu(parts), n_experts_ - kHybrid / kExpert - 1);
  EXPECT_EQ(parts.stream_from_tokens, kMeasuredCrossover);
  gpu_.streams = false;
  EXPECT_EQ(fitted(whole() - 1).parts.stream_from_tokens, 0);
}

// The memory of the others stays free: sequences have as much as before.
TEST_F(Fit, AtMostAsManyExpertsAsAreAskedFor) {
  request_.kv_fraction = 0.5;
  request_.max_kv_tokens = 1 << 20;
  const GpuShare all = fitted(whole() - 1);
  for (const int64_t most : {int64_t{0}, int64_t{100}, n_on_gpu(all.parts), int64_t{1} << 40}) {
    request_.most_on_gpu = most;
    const GpuShare share = fitted(whole() - 1);
    EXPECT_EQ(n_on_gpu(share.parts), std::min(most, n_on_gpu(all.parts)));
    EXPECT_EQ(share.kv_tokens, all.kv_tokens);
  }
}

// As many experts as the memory has room for; none are left out and none are too many.
TEST_F(Fit, ExpertsFillTheMemory) {
  const int64_t none = whole() - n_experts_ * kExpert + kHybrid;
  for (const int n : {1, 2, 30, 700}) {
    EXPECT_EQ(n_on_gpu(fitted(none + n * kExpert).parts), n);
    EXPECT_EQ(n_on_gpu(fitted(none + (n + 1) * kExpert - 1).parts), n);
  }
}

// The embedding, of which a step reads a row a token, leaves before the backbone does not fit.
TEST_F(Fit, TheEmbeddingLeavesFirst) {
  const int64_t none = whole() - n_experts_ * kExpert + kHybrid;
  EXPECT_TRUE(fitted(none).parts.embedding_on_cpu);
  const GpuParts least = fitted(none - kEmbedding).parts;
  EXPECT_EQ(n_on_gpu(least), 0);
  EXPECT_TRUE(least.embedding_on_cpu);
  const std::string refusal = error_of([&] { fitted(none - kEmbedding - 1); });
  EXPECT_TRUE(says(refusal, "--ctx 576 would fit")) << refusal;
  EXPECT_TRUE(says(error_of([&] { fitted(kBackbone); }), "do not fit with any --ctx"));
}

TEST_F(Fit, SequencesTakeTheirFraction) {
  const int64_t page = kPageSize * token_;
  request_.max_kv_tokens = 1000 * kPageSize;
  request_.kv_fraction = 0.5;
  EXPECT_EQ(fitted(whole() + 8 * page).kv_tokens, request_.context + 4 * kPageSize);
  EXPECT_EQ(fitted(whole() + 3 * page).kv_tokens, request_.context + 1 * kPageSize);
  request_.max_kv_tokens = request_.context + 2 * kPageSize;
  EXPECT_EQ(fitted(whole() + 8 * page).kv_tokens, request_.max_kv_tokens);
  // Beside experts on the CPU, half of the fraction, so that the other half goes to experts.
  request_.max_kv_tokens = 100'000 * kPageSize;
  const int64_t one = whole() - (n_experts_ - 1) * kExpert + kHybrid;
  EXPECT_EQ(fitted(one + 40 * page).kv_tokens, request_.context + 10 * kPageSize);
  EXPECT_EQ(n_on_gpu(fitted(one + 40 * page).parts), 1 + 30 * page / kExpert);
  request_.kv_fraction = 1;
  EXPECT_EQ(fitted(one + 40 * page).kv_tokens, request_.context + 40 * kPageSize);
}

TEST_F(Fit, TheWidestFormatThatFitsTheHost) {
  const auto format = [&](int64_t capacity) {
    host_.capacity_bytes = capacity;
    return fit_host(request_, host_, {}).format(1);
  };
  EXPECT_EQ(format(64'000'000'000), std::nullopt);
  EXPECT_EQ(format(63'999'999'999), weight_format("int8"));
  EXPECT_EQ(format(32'000'000'000), weight_format("int8"));
  EXPECT_EQ(format(31'999'999'999), weight_format("int4"));
  EXPECT_TRUE(says(error_of([&] { format(15'999'999'999); }), "needs 16.0 GB"));
  request_.experts = weight_format("int8");
  EXPECT_TRUE(says(error_of([&] { format(20'000'000'000); }), "needs 32.0 GB"));
}

// The last, begun page counts.
TEST_F(Fit, AContextOfNoWholePages) {
  request_.context += 1;
  const int64_t none = whole() - n_experts_ * kExpert + kHybrid - kEmbedding;
  EXPECT_TRUE(says(error_of([&] { fitted(none - 1); }), "--ctx 640 would fit"));
}

TEST_F(Fit, AnFp8CacheHasMoreTokens) {
  const int64_t page = kPageSize * kv_bytes_per_token(config_, DType::kF8E4M3);
  ASSERT_LT(page, kPageSize * token_);
  request_.kv_type = DType::kF8E4M3;
  request_.kv_fraction = 1;
  request_.max_kv_tokens = 1000 * kPageSize;
  EXPECT_EQ(fitted(whole() + 8 * page).kv_tokens, request_.context + 8 * kPageSize);
}

TEST_F(Fit, TheHostKeepsWhatTheGpuDoesNot) {
  const GpuParts parts = fitted(whole() - 1).parts;
  host_.capacity_bytes = 40'000'000'000;
  const ExpertsLayout experts = fit_host(request_, host_, {parts.experts});
  EXPECT_EQ(experts.elsewhere().experts, parts.experts);
  EXPECT_EQ(experts.format(1), weight_format("int8"));
}

// Packed INT4 of the checkpoint's groups is no conversion; BF16 may be one, of F32 weights.
TEST_F(Fit, OnlyStoredInt4IsNoConversion) {
  request_.experts = weight_format("bf16");
  EXPECT_EQ(fit_host(request_, host_, {}).format(1), weight_format("bf16"));
  const ModelConfig k2 = known_model("k2-thinking");
  const FitRequest int4 = {.config = k2,
                           .context = 1,
                           .kv_fraction = 0,
                           .max_kv_tokens = 0,
                           .kv_type = DType::kBF16,
                           .experts = weight_format("int4-32-bf16")};
  EXPECT_EQ(fit_host(int4, host_, {}).format(1), std::nullopt);
}

}  // namespace
}  // namespace tandem
