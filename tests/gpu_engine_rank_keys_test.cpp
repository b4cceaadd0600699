// Keys of prompts in the caches of several GPUs, of either type: what rank_keys_test does on CPUs.
// Ranks are threads here, with emulated GPUs.
#include "tests/hybrid_placements.h"
#include "tests/rank_keys.h"

namespace tandem::test::rank_keys {
namespace {

ModelOptions on_gpus(DType cache) {
  ModelOptions options = tiny(256);
  options.device = DeviceChoice::kCuda;
  options.step_tokens = 16;  // an emulated GPU is slow, and counts as lost after 12 s
  options.kv = cache;
  return options;
}

// A full page and a part of one.
Questions questions() { return {{prompt_of(0, 3)}, 3}; }

constexpr DType kTypes[] = {DType::kBF16, DType::kF8E4M3};

TEST(GpuRankKeys, PagesAreWhereTheyBelong) {
  const LimitedGpuMemory memory(kEnough);
  for (const DType cache : kTypes)
    for (const RankGrid& grid :
         {grid_without_rows(2, 1), grid_of(2, 1, 1), grid_without_rows(1, 2), grid_of(2, 1, 2)})
      expect_pages_where_they_belong(grid, on_gpus(cache));
}

TEST(GpuRankKeys, BitsAreThoseOfTheSameRanksAlone) {
  const LimitedGpuMemory memory(kEnough);
  const Questions asked = questions();
  struct Case {
    RankGrid grid;
    DType cache;
  };
  for (const auto& [grid, cache] :
       {Case{grid_without_rows(2, 1), DType::kBF16}, Case{grid_of(2, 1, 1), DType::kF8E4M3},
        Case{grid_without_rows(1, 2), DType::kF8E4M3}}) {
    SCOPED_TRACE(grid.name());
    const Answered want = computed_by(grid, on_gpus(cache), asked);
    const Fetched got = fetched_by(grid, grid, on_gpus(cache), on_gpus(cache), asked);
    EXPECT_TRUE(got.answered.answers == want.answers);
    EXPECT_EQ(got.answered.counts.n_fetched_tokens, fetchable(asked).n_tokens);
  }
}

// GPUs that divide a backbone, for one GPU, and the other way round.
TEST(GpuRankKeys, UnlikeGridsGiveTheSameTokens) {
  const LimitedGpuMemory memory(kEnough);
  const Questions asked = questions();
  const RankGrid one = grid_without_rows(1, 1);
  const Answered want = computed_by(one, on_gpus(DType::kBF16), asked);
  for (const auto& [prefill, decode] :
       {std::pair(grid_without_rows(2, 1), one), std::pair(one, grid_of(2, 1, 1))}) {
    SCOPED_TRACE(prefill.name() + " for " + decode.name());
    const Fetched got =
        fetched_by(decode, prefill, on_gpus(DType::kBF16), on_gpus(DType::kBF16), asked);
    EXPECT_EQ(tokens_of(got.answered), tokens_of(want));
    EXPECT_EQ(got.answered.counts.n_fetched_tokens, fetchable(asked).n_tokens);
  }
}

}  // namespace
}  // namespace tandem::test::rank_keys
