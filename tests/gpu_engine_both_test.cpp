// The engine with experts on a GPU, real or emulated, and on the CPU: recorded steps give the bits
// of steps launched kernel by kernel, and the GPU computes the shared expert while the CPU computes
// routed experts.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "gpu_kernels/gpu_facts.h"
#include "gpu_kernels/runtime.h"
#include "io/weight_store.h"
#include "loader/gpu_model.h"
#include "model/checkpoint.h"
#include "ops/cuda_device.h"
#include "tests/changing_batches.h"
#include "tests/setting.h"
#include "tests/whole_models.h"

namespace tandem::test {
namespace {

constexpr int64_t kContext = 17 * kPageSize;
constexpr StepLimits kLimits = {.max_tokens = 64, .max_logits = 32};

// Steps of at least `micro_batches_from` sequences have two micro-batches; 0: none.
GpuParts shared_parts(const ModelConfig& config, int micro_batches_from,
                      const std::function<bool(size_t)>& on_gpu) {
  GpuParts parts = evenly_on_gpu(config, 1 << 30);
  parts.micro_batches_from_sequences = micro_batches_from;
  for (auto& layer : parts.experts)
    for (size_t e = 0; e < layer.size(); ++e) layer[e] = on_gpu(e);
  return parts;
}

bool every_third(size_t expert) { return expert % 3 == 0; }

class OnBoth {
 public:
  OnBoth(const std::string& family, bool records, int micro_batches_from,
         const std::function<bool(size_t)>& on_gpu = every_third)
      : config_(ModelConfig::from_directory(kGolden + family)),
        store_(kGolden + family),
        stored_(stored_weights(store_, config_)),
        parts_(shared_parts(config_, micro_batches_from, on_gpu)),
        gpu_(load_gpu_model(store_, stored_, config_,
                            {.max_tokens = kLimits.max_tokens,
                             .max_logits = kLimits.max_logits,
                             .context = kContext,
                             .records = records},
                            parts_)) {
    ExpertsLayout layout;
    layout.keep_elsewhere({parts_.experts});
    host_ = load_weights(store_, stored_, config_,
                         {.layout = {kernels_, layout}, .cache_directory = {}}, home_);
    experts_ =
        std::make_unique<CpuExperts>(kernels_, config_, host_.weights, kLimits.max_tokens, team_);
    gpu_->add_cpu_experts(*experts_, nullptr, nullptr);
    cache_ = std::make_unique<KvCache>(
        config_, kContext, DType::kBF16,
        device().allocate(KvCache::bytes_for(config_, kContext, DType::kBF16)));
    start(gpu_->experts());
  }
  void start(ExpertPool& experts) {
    model_ = std::make_unique<StepRunner>(
        ModelParts{config_, gpu_->weights(), device(), gpu_->ops(), experts}, kLimits,
        AttentionForm::kAuto);
  }

  Device& device() { return gpu_->device(); }
  ExpertPool& experts() { return gpu_->experts(); }
  StepRunner& model() { return *model_; }
  KvCache& cache() { return *cache_; }
  int n_nodes() { return dynamic_cast<CudaDevice&>(device()).n_nodes_of_last_step(); }
  int n_early() { return dynamic_cast<CudaDevice&>(device()).n_early_of_last_step(); }
  int n_recorded() { return dynamic_cast<CudaDevice&>(device()).n_recorded(); }

 private:
  const ModelConfig config_;
  const WeightStore store_;
  ModelWeights stored_;
  const GpuParts parts_;
  const cpu::KernelTable kernels_ = cpu::kernels_for(cpu::best_isa());
  CpuWeights home_{kernels_};
  LoadedWeights host_;
  Team team_{1};
  std::unique_ptr<CpuExperts> experts_;
  std::unique_ptr<GpuModel> gpu_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<StepRunner> model_;
};

struct RecordedCase {
  const char* family;
  int micro_batches_from, n_steps;
};

TEST(GpuEngineBoth, RecordedStepsGiveTheSameBits) {
  constexpr int kSequences = 3;
  for (const auto& [family, micro_batches_from, n_steps] :
       {RecordedCase{"v2_lite", 0, 16}, {"v2_lite", 2, 16}, {"v3_1_fp8", 2, 6}}) {
    SCOPED_TRACE(testing::Message() << family << ", micro-batches from " << micro_batches_from);
    OnBoth recorded(family, true, micro_batches_from), eager(family, false, micro_batches_from);
    const auto prefers = [&](std::span<const Sequence> of) {
      const Batch step = {.tokens = {}, .positions = {}, .sequences = of, .logit_rows = {}};
      return recorded.experts().micro_batches(std::span(&step, 1), true) == 2;
    };
    const std::array<Sequence, 2> two = {};
    EXPECT_EQ(prefers(two), micro_batches_from == 2);
    EXPECT_FALSE(prefers(std::span(two).first(1)));
    const Batch prompts = {.tokens = {}, .positions = {}, .sequences = two, .logit_rows = {}};
    EXPECT_EQ(recorded.experts().micro_batches(std::span(&prompts, 1), false), 1);
    Conversations a(recorded.model(), recorded.cache(), 3, kSequences);
    Conversations b(eager.model(), eager.cache(), 3, kSequences);
    const std::set<size_t> sizes = expect_same_steps(a, b, kSequences, n_steps, 5);
    EXPECT_GE(sizes.size(), 2u);
    EXPECT_EQ(recorded.n_recorded(), static_cast<int>(sizes.size()));
    EXPECT_EQ(eager.n_recorded(), 0);
  }
}

// The kernels of a decode step of one sequence, with all experts on the CPU.
TEST(GpuEngineBoth, KernelsOfALayer) {
  OnBoth on("v3_1_fp8", true, 0, [](size_t) { return false; });
  Conversations one(on.model(), on.cache(), 3, 1);
  for (int32_t i = 0; i < 3; ++i) one.step({{0, {i}}});
  // norm, q_a and kv_a, q_b, rotate and append, absorb, attend, restore, o
  constexpr int kAttention = 8;
  // norm, gate and up, down
  constexpr int kDense = kAttention + 3;
  // the same, router, hand-down, sum of the CPU
  constexpr int kMoe = kDense + 3;
  // embedding; the last addition, gather, norm, head
  constexpr int kModel = 5;
  EXPECT_EQ(on.n_nodes(), kModel + kDense + 2 * kMoe);
  if (!gpu::early_launches(gpu::open_gpu().major)) {
    EXPECT_EQ(on.n_early(), 0) << "not asked for";
  }
}

// Asked to, all but the first kernel, the gathering and the last addition start early.
TEST(GpuEngineBoth, KernelsThatStartEarly) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "CUDA's runtime asks for the setting once";
  const Setting early("TANDEM_GPU_EARLY", "1"), hopper("TANDEM_GPU_CAPABILITY", "90");
  OnBoth on("v3_1_fp8", true, 0, [](size_t) { return false; });
  Conversations one(on.model(), on.cache(), 3, 1);
  for (int32_t i = 0; i < 3; ++i) one.step({{0, {i}}});
  EXPECT_EQ(on.n_early(), on.n_nodes() - 3);
}

// Launching a step of about 150 nodes waits until all but 8 have run, most of them after the CPU's
// work.
TEST(GpuEngineBoth, AStepIsComputedWhileItsLaunchWaits) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "gpu_signals_test does it with 4,000 nodes";
  OnBoth wide("v2_lite", true, 0);
  const Setting queue("TANDEM_GPU_QUEUE", "8");
  OnBoth narrow("v2_lite", true, 0);
  Conversations a(wide.model(), wide.cache(), 3, 2), b(narrow.model(), narrow.cache(), 3, 2);
  expect_same_steps(a, b, 2, 4, 5);
  EXPECT_GE(narrow.n_recorded(), 1);
}

// With blocking launches a kernel that waited for the CPU would wait forever.
TEST(GpuEngineBoth, NoKernelWaitsOnAGpuWithADisplay) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "CUDA reads CUDA_LAUNCH_BLOCKING once";
  const std::vector<std::vector<Conversations::Part>> steps = {
      {{0, {5, 7, 11}}, {1, {2}}}, {{0, {3}}, {1, {9}}}, {{0, {4}}, {1, {8}}}, {{1, {6}}}};
  const auto logits = [&](OnBoth& on) {
    Conversations all(on.model(), on.cache(), 3, 2);
    std::vector<std::vector<float>> rows;
    for (const auto& step : steps)
      for (std::vector<float>& row : all.step(step)) rows.push_back(std::move(row));
    return rows;
  };
  for (const int micro_batches_from : {0, 2}) {
    OnBoth usual("v2_lite", true, micro_batches_from);
    const auto want = logits(usual);
    const Setting watchdog("TANDEM_GPU_WATCHDOG", "1"), blocking("CUDA_LAUNCH_BLOCKING", "1");
    OnBoth with_display("v2_lite", true, micro_batches_from);
    expect_same_bits(logits(with_display), want);
    EXPECT_EQ(with_display.n_recorded(), 0);
  }
}

// Steps with equal numbers of tokens and sequences whose drafts are divided otherwise.
TEST(GpuEngineBoth, RecordedStepsWithDraftsGiveTheSameBits) {
  for (const int micro_batches_from : {0, 2}) {
    SCOPED_TRACE(testing::Message() << "micro-batches from " << micro_batches_from);
    OnBoth recorded("v3_1_fp8", true, micro_batches_from);
    OnBoth eager("v3_1_fp8", false, micro_batches_from);
    Conversations a(recorded.model(), recorded.cache(), 3, 4);
    Conversations b(eager.model(), eager.cache(), 3, 4);
    int32_t token = 0;
    for (const std::vector<int>& counts :
         {std::vector{1, 1, 2, 2}, {1, 1, 1, 3}, {1, 1, 2}, {1, 1, 1, 1}, {1, 1, 2, 2}}) {
      std::vector<Conversations::Part> parts;
      for (size_t s = 0; s < counts.size(); ++s) {
        std::vector<int32_t> tokens(counts[s]);
        for (int32_t& t : tokens) t = ++token;
        parts.push_back({static_cast<int>(s), tokens});
      }
      SCOPED_TRACE(testing::PrintToString(counts));
      expect_same_bits(a.step_with_drafts(parts), b.step_with_drafts(parts));
    }
    EXPECT_EQ(recorded.n_recorded(), 4);
  }
}

class Submissions final : public ExpertObserver {
 public:
  explicit Submissions(ExpertPool& experts) { experts.observe(this); }
  int of(const std::function<void()>& step) {
    n_ = 0;
    step();
    return n_;
  }

 private:
  void submitted(const ExpertBatch&) override { ++n_; }
  int n_ = 0;
};

// The larger batch of a prompt reads each expert once.
TEST(GpuEngineBoth, PromptsAreNotDivided) {
  constexpr int kMoeLayers = 2;
  OnBoth on("v3_1_fp8", false, 2);
  Submissions submissions(on.experts());
  Conversations two(on.model(), on.cache(), 3, 2);
  const std::vector<int32_t> prompt(20, 7);
  EXPECT_EQ(submissions.of([&] { two.step({{0, prompt}, {1, prompt}}); }), kMoeLayers);
  EXPECT_EQ(submissions.of([&] { two.step({{0, {1}}, {1, {2}}}); }), 2 * kMoeLayers);
  EXPECT_EQ(submissions.of([&] { two.step({{0, {1}}, {1, prompt}}); }), kMoeLayers);
  on.experts().observe(nullptr);
}

// Copies y, to which the shared expert is added, at submit() and at waits(). The second copy must
// be complete before the CPU's sum is added, and must differ from the first.
class Overlapping final : public ExpertPool {
 public:
  Overlapping(ExpertPool& experts, Device& device, int64_t bytes)
      : experts_(experts),
        device_(device),
        before_(device.allocate_on_host(bytes)),
        after_(device.allocate_on_host(bytes)) {}

  bool waits(Ticket ticket) override {
    if (y_) device_.copy(y_, n_bytes_, after_.span().data());
    return experts_.waits(ticket);
  }
  // Called by the thread that computes the CPU's experts during the call.
  void add_to(Ticket ticket, TensorView y) override {
    const bool known = y_ == y.data;
    y_ = y.data;
    n_bytes_ = y.rows * y.row_bytes();
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(n_late > 0 ? 0 : 5);
    while (known && !arrived() && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    if (known) {
      n_late += !arrived();
      ++n_compared;
      n_same += std::memcmp(before_.span().data(), after_.span().data(), n_bytes_) == 0;
    }
    experts_.add_to(ticket, y);
  }

  int n_late = 0, n_compared = 0, n_same = 0;

 private:
  Ticket start(const ExpertBatch& batch) override {
    std::memset(after_.span().data(), 0xff, after_.span().size());
    if (y_) device_.copy(y_, n_bytes_, before_.span().data());
    return experts_.submit(batch);
  }
  bool arrived() const {  // none of the floats is the NaN written before
    const auto* words = reinterpret_cast<const volatile uint32_t*>(after_.span().data());
    for (int64_t i = 0; i < n_bytes_ / 4; ++i)
      if (words[i] == ~0u) return false;
    return true;
  }

  ExpertPool& experts_;
  Device& device_;
  const Buffer before_, after_;
  void* y_ = nullptr;  // set by the first add_to()
  int64_t n_bytes_ = 0;
};

TEST(GpuEngineBoth, TheSharedExpertRunsBesideTheCpu) {
  OnBoth on("v3_1_fp8", false, 0);
  Overlapping experts(on.experts(), on.device(), 1 << 16);
  on.start(experts);
  Conversations one(on.model(), on.cache(), 3, 1);
  for (int32_t i = 0; i < 6; ++i) one.step({{0, {i}}});
  EXPECT_EQ(experts.n_late, 0) << "the GPU waited for the CPU before the shared expert";
  EXPECT_EQ(experts.n_compared, 11) << "two layers with experts";
  EXPECT_EQ(experts.n_same, 0) << "the shared expert was not between submit() and waits()";
}

}  // namespace
}  // namespace tandem::test
