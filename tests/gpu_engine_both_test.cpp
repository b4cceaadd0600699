// The engine with experts on a GPU, real or emulated, and on the CPU: recorded steps give the bits
// of steps kernel by kernel, and the forward pass leaves the shared expert to the card while the
// CPU computes.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "gpu_model.h"
#include "io/weight_store.h"
#include "model/checkpoint.h"
#include "ops/cuda_ops.h"
#include "tests/changing_batches.h"

namespace tandem::test {
namespace {

constexpr int64_t kContext = 17 * kPageSize;
constexpr DeepSeek::Limits kLimits = {.max_tokens = 64, .max_logits = 32};

// Every third expert on the card; in halves from so many sequences on, 0: never.
CardParts shared_parts(const ModelConfig& config, int halve_from) {
  CardParts parts = evenly_on_card(config, 1 << 30);
  parts.halve_from_sequences = halve_from;
  for (auto& layer : parts.experts)
    for (size_t e = 0; e < layer.size(); ++e) layer[e] = e % 3 == 0;
  return parts;
}

// Experts that others watch on their way in.
class Watched : public RoutedExperts {
 public:
  explicit Watched(RoutedExperts& experts) : experts_(experts) {}
  void submit(const ExpertBatch& batch) override { experts_.submit(batch); }
  void add_to(TensorView y) override { experts_.add_to(y); }
  void add_rest_to(int layer, int first_row, TensorView y) override {
    experts_.add_rest_to(layer, first_row, y);
  }
  bool wants_halves(int n_sequences) const override { return experts_.wants_halves(n_sequences); }
  void follow(const StepParts& step) override { experts_.follow(step); }

 private:
  RoutedExperts& experts_;
};

class OnBoth {
 public:
  OnBoth(const std::string& family, bool records, int halve_from)
      : config_(ModelConfig::from_directory(kGolden + family)),
        store_(kGolden + family),
        stored_(stored_weights(store_, config_)),
        parts_(shared_parts(config_, halve_from)),
        gpu_(load_gpu_model(store_, stored_, config_,
                            {.max_tokens = kLimits.max_tokens,
                             .max_logits = kLimits.max_logits,
                             .context = kContext,
                             .records = records},
                            parts_)) {
    ExpertsLayout layout;
    layout.keep_elsewhere(parts_.experts);
    host_ = load_weights(store_, stored_, config_,
                         {.layout = {kernels_, layout}, .cache_directory = {}}, home_);
    experts_ =
        std::make_unique<CpuExperts>(kernels_, config_, host_.weights, kLimits.max_tokens, team_);
    gpu_->add_cpu_experts(*experts_, nullptr);
    cache_ = std::make_unique<KvCache>(
        config_, kContext, DType::kBF16,
        ops().allocate(KvCache::bytes_for(config_, kContext, DType::kBF16)));
    start(gpu_->experts());
  }
  void start(RoutedExperts& experts) {
    model_ = std::make_unique<DeepSeek>(config_, gpu_->weights(), ops(), experts, kLimits,
                                        AttentionForm::kAuto);
  }

  Ops& ops() { return gpu_->ops(); }
  RoutedExperts& experts() { return gpu_->experts(); }
  DeepSeek& model() { return *model_; }
  KvCache& cache() { return *cache_; }
  int n_recorded() { return dynamic_cast<CudaOps&>(ops()).n_recorded(); }

 private:
  const ModelConfig config_;
  const WeightStore store_;
  ModelWeights stored_;
  const CardParts parts_;
  const cpu::KernelTable kernels_ = cpu::kernels_for(cpu::best_isa());
  CpuWeights home_{kernels_};
  LoadedWeights host_;
  Team team_{1};
  std::unique_ptr<CpuExperts> experts_;
  std::unique_ptr<GpuModel> gpu_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<DeepSeek> model_;
};

struct Case {
  const char* family;
  int halve_from, n_steps;
};

TEST(GpuEngineBoth, RecordedStepsGiveTheSameBits) {
  constexpr int kSequences = 3;
  for (const auto& [family, halve_from, n_steps] :
       {Case{"v2_lite", 0, 16}, {"v2_lite", 2, 16}, {"v3_1_fp8", 2, 6}}) {
    SCOPED_TRACE(testing::Message() << family << ", in halves from " << halve_from);
    OnBoth recorded(family, true, halve_from), eager(family, false, halve_from);
    EXPECT_EQ(recorded.experts().wants_halves(2), halve_from == 2);
    Conversations a(recorded.model(), recorded.cache(), 3, kSequences);
    Conversations b(eager.model(), eager.cache(), 3, kSequences);
    const std::set<size_t> sizes = expect_same_steps(a, b, kSequences, n_steps, 5);
    EXPECT_GE(sizes.size(), 2u);
    EXPECT_EQ(recorded.n_recorded(), static_cast<int>(sizes.size()));
    EXPECT_EQ(eager.n_recorded(), 0);
  }
}

// Copies of y, which the shared expert computes: at submit(), and at add_to(). The second must have
// been made before the CPU's sum is there, and differ.
class Overlapping final : public Watched {
 public:
  Overlapping(RoutedExperts& experts, Ops& ops, int64_t bytes)
      : Watched(experts),
        ops_(ops),
        before_(ops.allocate_on_host(bytes)),
        after_(ops.allocate_on_host(bytes)) {}

  void submit(const ExpertBatch& batch) override {
    std::memset(after_.span().data(), 0xff, after_.span().size());
    if (y_) ops_.copy(y_, n_bytes_, before_.span().data());
    Watched::submit(batch);
  }
  void add_to(TensorView y) override {
    const bool known = y_ == y.data;
    y_ = y.data;
    n_bytes_ = y.rows * y.row_bytes();
    ops_.copy(y_, n_bytes_, after_.span().data());
    compares_ = known;
    Watched::add_to(y);
  }
  // Called by the thread that would compute the CPU's part in it.
  void add_rest_to(int layer, int first_row, TensorView y) override {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(n_late > 0 ? 0 : 5);
    while (!arrived() && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    n_late += !arrived();
    if (compares_) {
      ++n_compared;
      n_same += std::memcmp(before_.span().data(), after_.span().data(), n_bytes_) == 0;
    }
    Watched::add_rest_to(layer, first_row, y);
  }

  int n_late = 0, n_compared = 0, n_same = 0;

 private:
  bool arrived() const {  // none of its floats is such a NaN
    const auto* words = reinterpret_cast<const volatile uint32_t*>(after_.span().data());
    for (int64_t i = 0; i < n_bytes_ / 4; ++i)
      if (words[i] == ~0u) return false;
    return true;
  }

  Ops& ops_;
  const Buffer before_, after_;
  void* y_ = nullptr;
  int64_t n_bytes_ = 0;
  bool compares_ = false;
};

TEST(GpuEngineBoth, TheSharedExpertRunsBesideTheCpu) {
  OnBoth on("v3_1_fp8", false, 0);
  Overlapping experts(on.experts(), on.ops(), 1 << 16);
  on.start(experts);
  Conversations one(on.model(), on.cache(), 3, 1);
  for (int32_t i = 0; i < 6; ++i) one.step({{0, {i}}});
  EXPECT_EQ(experts.n_late, 0) << "the card waited for the CPU before the shared expert";
  EXPECT_EQ(experts.n_compared, 11) << "two layers with experts";
  EXPECT_EQ(experts.n_same, 0) << "the shared expert was not between submit() and add_to()";
}

}  // namespace
}  // namespace tandem::test
