// Memory is decided before the first step also where GPU and CPU share it: such a step allocates
// nothing. Only with the emulated GPU, which says what is its own.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>

#include "conversation.h"
#include "gpu_kernels/emulated/emulator.h"
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

// Experts on both sides in every layer.
Placement shared_placement(const ModelConfig& c, int stream_from) {
  Placement p = backbone_on_card(c, kContext);
  p.prefill_chunk_tokens = 64;
  p.stream_from_tokens = stream_from;
  p.micro_batches = 2;
  for (int l = 0; l < c.n_layers; ++l) {
    if (!c.is_moe(l)) continue;
    ExpertGroup cpu = {{}, stored_expert_format(c), {kCpu}}, card = cpu;
    card.owners = {kCard};
    for (int e = 0; e < c.router.n_experts; ++e) (e % 3 > 0 ? cpu : card).experts.push_back(e);
    p.layers.push_back({l, l, {cpu, card}});
  }
  return p;
}

class SharedSteps {
 public:
  SharedSteps(const ModelOptions& options) : loaded_(options), logits_(loaded_.config().vocab) {
    EXPECT_TRUE(says(loaded_.device(), "experts also on the cpu"));
  }
  // Of tokens from here on; how much it allocates.
  int64_t allocations_of(int n_tokens) {
    std::vector<int32_t> tokens(n_tokens), positions(n_tokens);
    for (int i = 0; i < n_tokens; ++i) {
      tokens[i] = (7 * i + 3) % loaded_.config().vocab;
      positions[i] = length_ + i;
    }
    length_ += n_tokens;
    const Sequence sequence{0, n_tokens, length_, pages_};
    return allocations_of({tokens, positions, {&sequence, 1}, {}});
  }
  // Of two sequences, which go through the layers in turn.
  int64_t allocations_of_halves() {
    const int32_t position = length_++;
    const std::vector<int32_t> tokens = {1, 2}, positions = {position, position};
    const std::vector<Sequence> sequences = {{0, 1, length_, pages_}, {1, 1, length_, others_}};
    return allocations_of({tokens, positions, sequences, {}});
  }

 private:
  int64_t allocations_of(Batch batch) {
    const int32_t last = batch.n() - 1;
    batch.logit_rows = {&last, 1};
    const int64_t vocab = std::ssize(logits_), before = n_allocations;
    loaded_.model().forward(batch, loaded_.cache(), {logits_.data(), 1, vocab, vocab, DType::kF32});
    return n_allocations - before;
  }

  LoadedModel loaded_;
  std::vector<float> logits_;
  const std::vector<int32_t> pages_ = {0, 1, 2}, others_ = {1, 2, 0};
  int length_ = 0;
};

TEST(HybridAllocations, NothingIsAllocatedInASharedStep) {
  const CardMemory memory(kEnough);
  for (const char* family : {"v3_fp8", "v2_lite"})
    for (const int stream_from : {0, 8}) {
      SCOPED_TRACE(testing::Message() << family << ", streamed from " << stream_from);
      const std::string directory = kGolden + family;
      const PlacementFile file(
          shared_placement(ModelConfig::from_directory(directory), stream_from));
      SharedSteps steps(
          {.directory = directory, .device = "cuda", .n_threads = 2, .placement = file.path()});
      steps.allocations_of(16);  // the first of their kinds, which start threads
      steps.allocations_of(1);   // is recorded
      EXPECT_EQ(steps.allocations_of(16), 0) << "in a step of a prompt";
      for (int i = 0; i < 5; ++i) EXPECT_EQ(steps.allocations_of(1), 0) << "in a decode step";
      steps.allocations_of_halves();
      for (int i = 0; i < 5; ++i) EXPECT_EQ(steps.allocations_of_halves(), 0) << "in halves";
    }
  const int64_t before = n_allocations;
  free(malloc(1));
  EXPECT_EQ(n_allocations - before, 1) << "the counter counts";
}

}  // namespace
}  // namespace tandem::test
