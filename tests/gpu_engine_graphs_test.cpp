// Decode steps on a GPU as recorded graphs: the same bits as kernel by kernel, one recording for
// each number of sequences, and no recording of steps that change.
#include <gtest/gtest.h>

#include <cstdlib>

#include "io/weight_store.h"
#include "loader/gpu_model.h"
#include "model/checkpoint.h"
#include "ops/cuda_device.h"
#include "tests/changing_batches.h"
#include "tests/golden_file.h"
#include "tests/whole_models.h"

namespace tandem::test {
namespace {

constexpr int64_t kManyPages = 33 * kPageSize;  // for 33 sequences
constexpr StepLimits kManySequences = {.max_tokens = 64, .max_logits = 33};

class OnGpu {
 public:
  OnGpu(const std::string& family, bool records, AttentionForm form = AttentionForm::kAuto)
      : config_(ModelConfig::from_directory(kGolden + family)),
        store_(kGolden + family),
        stored_(stored_weights(store_, config_)),
        gpu_(load_gpu_model(store_, stored_, config_,
                            {.max_tokens = kManySequences.max_tokens,
                             .max_logits = kManySequences.max_logits,
                             .context = kManyPages,
                             .records = records},
                            evenly_on_gpu(config_, 1 << 30))),
        model_({config_, gpu_->weights(), gpu_->device(), gpu_->ops(), gpu_->experts()},
               kManySequences, form),
        cache_(config_, kManyPages, DType::kBF16,
               gpu_->device().allocate(KvCache::bytes_for(config_, kManyPages, DType::kBF16))) {}

  StepRunner& model() { return model_; }
  KvCache& cache() { return cache_; }
  int n_recorded() { return dynamic_cast<CudaDevice&>(gpu_->device()).n_recorded(); }

 private:
  const ModelConfig config_;
  const WeightStore store_;
  ModelWeights stored_;
  std::unique_ptr<GpuModel> gpu_;
  StepRunner model_;
  KvCache cache_;
};

class GpuGraphs : public testing::TestWithParam<std::string> {};

TEST_P(GpuGraphs, TokenByTokenTheSameBits) {
  const GoldenFile golden(kGolden + GetParam() + "/golden.safetensors");
  OnGpu recorded(GetParam(), true), eager(GetParam(), false);
  Conversations a(recorded.model(), recorded.cache(), 3, 1);
  Conversations b(eager.model(), eager.cache(), 3, 1);
  int n_steps = 0;
  for (const int length : {5, 17}) {
    const std::string name = "tokens_" + std::to_string(length);
    if (!golden.has(name)) continue;
    for (const int32_t token : golden.ints(name)) {
      SCOPED_TRACE(testing::Message() << "of " << length << ", step " << n_steps);
      expect_same_bits(a.step({{0, {token}}}), b.step({{0, {token}}}));
      ++n_steps;
    }
    break;  // one prompt is enough
  }
  EXPECT_GE(n_steps, 5);
  EXPECT_EQ(recorded.n_recorded(), 1);
  EXPECT_EQ(eager.n_recorded(), 0);
}

INSTANTIATE_TEST_SUITE_P(Families, GpuGraphs, testing::ValuesIn(golden_families(kGolden)),
                         [](const auto& info_of) { return info_of.param; });

TEST(GpuGraphs, StepsOfChangingBatches) {
  constexpr int kSequences = 3;
  OnGpu recorded("v2_lite", true), eager("v2_lite", false);
  Conversations a(recorded.model(), recorded.cache(), 3, kSequences);
  Conversations b(eager.model(), eager.cache(), 3, kSequences);
  const std::set<size_t> sizes = expect_same_steps(a, b, kSequences, 50, 5);
  EXPECT_EQ(recorded.n_recorded(), static_cast<int>(sizes.size()));
}

// The step has more tokens than the skinny products take.
TEST(GpuGraphs, StepsOfManySequences) {
  OnGpu recorded("v3_1_fp8", true), eager("v3_1_fp8", false);
  constexpr int kMany = 17;
  Conversations a(recorded.model(), recorded.cache(), 3, kMany);
  Conversations b(eager.model(), eager.cache(), 3, kMany);
  std::vector<Conversations::Part> parts;
  for (int s = 0; s < kMany; ++s) parts.push_back({s, {s}});
  for (int step = 0; step < 2; ++step) expect_same_bits(a.step(parts), b.step(parts));
  EXPECT_EQ(recorded.n_recorded(), 1);
}

// Steps of more than 32 sequences and steps with a form of attention that reads lengths on the host
// are not recorded.
TEST(GpuGraphs, OtherStepsAreNotRecorded) {
  OnGpu gpu("v3_1_fp8", true);
  constexpr int kTooMany = 33;
  Conversations many(gpu.model(), gpu.cache(), 3, kTooMany);
  std::vector<Conversations::Part> parts;
  for (int s = 0; s < kTooMany; ++s) parts.push_back({s, {s}});
  many.step(parts);
  EXPECT_EQ(gpu.n_recorded(), 0);
  parts.pop_back();
  many.step(parts);
  EXPECT_EQ(gpu.n_recorded(), 1);

  OnGpu naive("v3_1_fp8", true, AttentionForm::kNaive);
  Conversations one(naive.model(), naive.cache(), 3, 1);
  one.step({{0, {1}}});
  one.step({{0, {2}}});
  EXPECT_EQ(naive.n_recorded(), 0);
}

}  // namespace
}  // namespace tandem::test
