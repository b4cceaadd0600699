// Ranks of which some compute on emulated GPUs and others on CPUs, as threads: logits and answers
// of one process on the CPU, in every grid and way of exchanging rows, with all experts of a rank
// on its GPU and with some beside it.
#include <gtest/gtest.h>

#include "engine/completion.h"
#include "tests/expert_moves.h"
#include "tests/golden_file.h"
#include "tests/gpu_memory.h"
#include "tests/gpu_ranks.h"
#include "tests/hybrid_placements.h"
#include "tests/rank_grids.h"

namespace tandem::test {
namespace {

constexpr ExpertDispatch kAuto = ExpertDispatch::kAuto, kGather = ExpertDispatch::kGather,
                         kAllToAll = ExpertDispatch::kAllToAll,
                         kLowLatency = ExpertDispatch::kLowLatency;

// A GPU and a CPU have a replica each, divide one, or have a stage each; and larger grids.
const std::vector<RankGrid> kGrids = {
    {.dp = 2, .tp = 1, .dispatch = kGather, .gpus = "gc"},
    {.dp = 1, .tp = 2, .gpus = "gc"},
    {.dp = 1, .tp = 1, .pp = 2, .gpus = "gc"},
    {.dp = 2, .tp = 1, .dispatch = kAllToAll, .gpus = "cg"},
    {.dp = 1, .tp = 3, .gpus = "cgg"},
    {.dp = 1, .tp = 1, .pp = 2, .gpus = "cg"},
    {.dp = 3, .tp = 1, .dispatch = kLowLatency, .gpus = "gcg"},
    {.dp = 1, .tp = 2, .dispatch = kGather, .gpus = "cg"},
    {.dp = 1, .tp = 2, .pp = 2, .gpus = "ggcc"},
    {.dp = 2, .tp = 2, .dispatch = kAllToAll, .gpus = "gcgc"},
    {.dp = 1, .tp = 4, .gpus = "gccc"},
    {.dp = 2, .tp = 1, .pp = 2, .gpus = "gccc"},
    {.dp = 2, .tp = 2, .dispatch = kLowLatency, .gpus = "cccg"},
    {.dp = 4, .tp = 1, .dispatch = kAllToAll, .hosts = {2, 2}, .gpus = "gcgc"},
    {.dp = 1, .tp = 2, .pp = 2, .gpus = "gccg"},
    {.dp = 2, .tp = 4, .dispatch = kGather, .gpus = "ggccgccc"},
    {.dp = 8, .tp = 1, .dispatch = kLowLatency, .gpus = "gcgcgcgc"},
    {.dp = 2, .tp = 2, .dispatch = kAllToAll, .pp = 2, .gpus = "gcccccgg"},
};

class RanksOfTwoKinds : public testing::TestWithParam<std::string> {};

// Every family has a third of the grids; make test-long computes the others.
TEST_P(RanksOfTwoKinds, HaveTheLogitsOfTheCpu) {
  const std::string directory = kGolden + GetParam();
  const std::vector<int32_t> tokens = golden_text(directory);
  LoadedModel cpu(reference_of(directory));
  const Logits want = logits_at_once(cpu, tokens, 1, 0)[0];
  const std::vector<std::string> families = families_without_ties(kGolden);
  const size_t family = std::ranges::find(families, GetParam()) - families.begin();
  ModelOptions options = reference_of(directory);
  options.device = DeviceChoice::kCuda;
  const int64_t half = bytes_for_experts([&] { return LoadedModel(options).device(); }, 0.5, 1000);
  for (size_t i = 0; i < kGrids.size(); ++i) {
    if ((i % 3 == family % 3) == is_long()) continue;
    for (const int64_t bytes : {half, kEnough}) {
      const LimitedGpuMemory memory(bytes);
      on_grid(kGrids[i], options, [&](LoadedModel& loaded) {
        SCOPED_TRACE(fmt::format("{}, {} bytes", kGrids[i].name(), bytes));
        for (const Logits& rows : logits_at_once(loaded, tokens, kGrids[i].dp + 1, 0))
          expect_close_logits(rows, want, 2e-2);
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, RanksOfTwoKinds,
                         testing::ValuesIn(families_without_ties(kGolden)),
                         [](const auto& info_of) { return info_of.param; });

}  // namespace
}  // namespace tandem::test
