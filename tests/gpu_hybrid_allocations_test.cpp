// A decode step allocates no memory on host or GPU and waits for the GPU once, for its logits, also
// where GPU and CPU share the experts. On the emulated GPU only, which counts allocations and
// waits.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <ostream>

#include "cli/conversation.h"
#include "gpu_kernels/emulated/emulator.h"
#include "model/cost.h"
#include "tests/error_of.h"
#include "tests/hybrid_placements.h"
#include "tests/whole_models.h"

namespace {
std::atomic<int64_t> n_allocations{0};
}  // namespace

extern "C" void* __libc_malloc(size_t);
extern "C" void* malloc(size_t n) {
  if (!tandem::gpu::emulated::in_driver()) ++n_allocations;
  return __libc_malloc(n);
}

namespace tandem::test {
namespace {

// Both devices have experts of every layer.
Placement shared_placement(const ModelConfig& c, int stream_from) {
  Placement p = backbone_on_gpu(c, kContext);
  p.prefill_chunk_tokens = 64;
  p.stream_from_tokens = stream_from;
  p.micro_batches = 2;
  for (int l = 0; l < c.n_layers; ++l) {
    if (!c.is_moe(l)) continue;
    ExpertGroup cpu = {{}, stored_expert_format(c), {kCpu}}, gpu = cpu;
    gpu.owners = {kGpu};
    for (int e = 0; e < c.router.n_experts; ++e) (e % 3 > 0 ? cpu : gpu).experts.push_back(e);
    p.layers.push_back({l, l, {cpu, gpu}});
  }
  return p;
}

struct Cost {
  int64_t allocations = 0;  // allocations of host memory
  int64_t buffers = 0;      // buffers on the GPU and in pinned memory
  int64_t waits = 0;        // waits of the host for the GPU

  static Cost so_far() {
    const gpu::emulated::Counts& counts = gpu::emulated::counts();
    return {n_allocations, counts.buffers, counts.waits};
  }
  Cost operator-(const Cost& other) const {
    return {allocations - other.allocations, buffers - other.buffers, waits - other.waits};
  }
  bool operator==(const Cost&) const = default;
  friend std::ostream& operator<<(std::ostream& out, const Cost& c) {
    return out << c.allocations << " allocations, " << c.buffers << " buffers, " << c.waits
               << " waits";
  }
};
constexpr Cost kLogitsAwaited = {.waits = 1};

class Steps {
 public:
  Steps(const ModelOptions& options, bool shared)
      : loaded_(options), logits_(loaded_.config().vocab) {
    EXPECT_EQ(says(loaded_.device(), "experts also on the cpu"), shared);
  }
  // The cost of the next `n_tokens` of a prompt of one sequence.
  Cost of_prompt(int n_tokens) {
    length_ += n_tokens;
    return of({{0, n_tokens, length_, pages_}});
  }
  // The cost of one token for each sequence; the sequences share pages.
  Cost of_decode(int n_sequences) {
    ++length_;
    std::vector<Sequence> sequences;
    for (int s = 0; s < n_sequences; ++s)
      sequences.push_back({s, 1, length_, s % 2 ? others_ : pages_});
    return of(sequences);
  }

 private:
  Cost of(const std::vector<Sequence>& sequences) {
    std::vector<int32_t> tokens, positions;
    for (const Sequence& s : sequences)
      for (int i = 0; i < s.n_tokens; ++i) {
        tokens.push_back((7 * i + 3) % loaded_.config().vocab);
        positions.push_back(s.kv_length - s.n_tokens + i);
      }
    const auto last = static_cast<int32_t>(tokens.size()) - 1;
    const Batch batch = {tokens, positions, sequences, {&last, 1}};
    const int64_t vocab = std::ssize(logits_);
    const Cost before = Cost::so_far();
    loaded_.model().forward(batch, loaded_.cache(), {logits_.data(), 1, vocab, vocab, DType::kF32});
    return Cost::so_far() - before;
  }

  LoadedModel loaded_;
  std::vector<float> logits_;
  const std::vector<int32_t> pages_ = {0, 1, 2}, others_ = {1, 2, 0};
  int length_ = 0;
};

// Covers recorded steps of one micro-batch and of two, and steps of 17 sequences, which are not
// recorded.
void expect_nothing_but_logits(Steps& steps) {
  for (const int n : {1, 2, 17}) {
    SCOPED_TRACE(testing::Message() << n << " sequences");
    steps.of_decode(n);  // the first such step starts threads or records a graph
    for (int i = 0; i < (n < 17 ? 3 : 1); ++i) EXPECT_EQ(steps.of_decode(n), kLogitsAwaited);
  }
}

TEST(HybridAllocations, NothingIsAllocatedInASharedStep) {
  const LimitedGpuMemory memory(kEnough);
  for (const auto& [family, stream_from] : {std::pair{"v3_fp8", 20}, {"v2_lite", 0}}) {
    SCOPED_TRACE(testing::Message() << family << ", streamed from " << stream_from);
    const std::string directory = kGolden + family;
    const PlacementFile file(shared_placement(ModelConfig::from_directory(directory), stream_from));
    Steps steps({.directory = directory,
                 .device = DeviceChoice::kCuda,
                 .n_threads = 2,
                 .placement = file.path()},
                true);
    steps.of_prompt(20);  // the first such step may allocate
    const Cost prompt = steps.of_prompt(20);
    EXPECT_EQ(prompt.allocations, 0) << "in a step of a prompt";
    EXPECT_EQ(prompt.buffers, 0) << "in a step of a prompt";
    if (stream_from == 0) {  // when streaming, the team also waits for the link
      EXPECT_EQ(prompt.waits, 1) << "in a step of a prompt";
    }
    expect_nothing_but_logits(steps);
  }
  Cost before = Cost::so_far();
  free(malloc(1));
  EXPECT_EQ(Cost::so_far() - before, (Cost{.allocations = 1})) << "the counters count";
  gpu::Stream stream;
  before = Cost::so_far();
  stream.wait();
  const gpu::Buffer buffer(1, gpu::Site::kMapped);
  EXPECT_EQ(Cost::so_far().buffers - before.buffers, 1);
  EXPECT_EQ(Cost::so_far().waits - before.waits, 1);
}

TEST(HybridAllocations, NothingIsAllocatedInAStepOfTheGpuAlone) {
  Steps steps({.directory = kGolden + "v2_lite",
               .device = DeviceChoice::kCuda,
               .n_threads = 1,
               .context = 192},
              false);
  steps.of_prompt(20);
  EXPECT_EQ(steps.of_prompt(20), kLogitsAwaited) << "in a step of a prompt";
  expect_nothing_but_logits(steps);
}

}  // namespace
}  // namespace tandem::test
