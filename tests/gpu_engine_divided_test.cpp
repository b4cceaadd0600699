// Replicas of the backbone on the emulated GPUs of ranks, which are threads here, and together
// divide dense layers and the head: the CPU's logits, in steps that are recorded and not.
#include <gtest/gtest.h>

#include "model/cost.h"
#include "tests/expert_moves.h"
#include "tests/golden_file.h"
#include "tests/gpu_ranks.h"
#include "tests/hybrid_placements.h"
#include "tests/rank_grids.h"

namespace tandem::test {
namespace {

class GpusThatDivideByReplicas : public testing::TestWithParam<std::string> {};

// Texts of different lengths, in steps of up to 64 and of 6 tokens, which have one piece and
// several, and few and many rows of logits.
TEST_P(GpusThatDivideByReplicas, HaveTheLogitsOfTheCpu) {
  const LimitedGpuMemory memory(kEnough);
  const std::string directory = kGolden + GetParam();
  const std::vector<int32_t> tokens = golden_text(directory);
  LoadedModel cpu(reference_of(directory));
  const Logits want = logits_at_once(cpu, tokens, 1, 0)[0];
  struct Case {
    RankGrid grid;
    SharedByReplicas divided;
  };
  const std::vector<Case> cases = {
      {{.dp = 2, .tp = 1, .gpus = "gg"}, {.dense = true, .head = true}},
      {{.dp = 2, .tp = 2, .micro_batches = 2, .gpus = "gggg"}, {.dense = true, .head = true}},
      {{.dp = 3, .tp = 1, .gpus = "ggg"}, {.dense = true}},
      {{.dp = 2, .tp = 1, .pp = 2, .gpus = "gggg"}, {.dense = true, .head = true}}};
  const std::vector<std::string> families = families_without_ties(kGolden);
  const size_t family = std::ranges::find(families, GetParam()) - families.begin();
  const auto& [grid, divided] = cases[family % cases.size()];
  for (const int step_tokens : {64, 6}) {
    ModelOptions options = reference_of(directory);
    options.step_tokens = step_tokens;
    options.by_replicas = divided;
    on_grid(grid, options, [&](LoadedModel& loaded) {
      SCOPED_TRACE(fmt::format("{}, {} tokens", grid.name(), step_tokens));
      for (const Logits& rows : logits_at_once(loaded, tokens, grid.dp + 1, 0))
        expect_close_logits(rows, want, 2e-2);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Families, GpusThatDivideByReplicas,
                         testing::ValuesIn(families_without_ties(kGolden)),
                         [](const auto& info_of) { return info_of.param; });

// Decode steps, which are recorded, with drafts; replicas without sequences at the end.
TEST(GpuRanksThatDivideByReplicas, GiveTheSameAnswers) {
  const LimitedGpuMemory memory(kEnough);
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  const std::vector<Request> requests = questions(kTinyR1, tokenizer, 5);
  LoadedModel cpu(tiny_r1(DeviceChoice::kCpu));
  const std::vector<std::vector<int32_t>> want = tokens_of(cpu, tokenizer, requests, 2);
  for (const DraftChoice draft : {DraftChoice::kOff, DraftChoice::kMtp}) {
    ModelOptions options = tiny_r1(DeviceChoice::kCuda);
    options.draft = draft;
    options.max_logits = 16;
    options.by_replicas = {.dense = true, .head = true};
    on_grid({.dp = 2, .tp = 1, .gpus = "gg"}, options, [&](LoadedModel& loaded) {
      EXPECT_EQ(tokens_of(loaded, tokenizer, requests, 2), want);
    });
  }
}

}  // namespace
}  // namespace tandem::test
