// Replicas of the backbone whose ranks together divide dense layers and the head, as threads:
// golden logits and the embedded model's answers, on grids of all kinds, while replicas have
// different numbers of tokens or none, and what each rank reads.
#include <gtest/gtest.h>

#include <mutex>
#include <random>

#include "model/cost.h"
#include "tests/expert_moves.h"
#include "tests/golden_file.h"
#include "tests/hybrid_placements.h"
#include "tests/rank_grids.h"

namespace tandem::test {
namespace {

constexpr SharedByReplicas kDense = {.dense = true}, kHead = {.head = true},
                           kBoth = {.dense = true, .head = true};

struct DividedCase {
  RankGrid grid;
  SharedByReplicas divided;
};

class DividedByReplicas : public testing::TestWithParam<std::string> {};

// Every family has a third of the cases; make test-long computes the others. The texts have
// different lengths, so that steps have different numbers of rows and at the end some replicas
// none.
TEST_P(DividedByReplicas, HaveTheGoldenLogits) {
  const std::string directory = kGolden + GetParam();
  const GoldenFile golden(directory + "/golden.safetensors");
  const bool ties = GetParam() == "t1";  // which only float32 decides as the golden values do
  const std::vector<DividedCase> cases = {{{.dp = 2, .tp = 1}, kBoth},
                                          {{.dp = 3, .tp = 1, .micro_batches = 2}, kBoth},
                                          {{.dp = 2, .tp = 2}, kBoth},
                                          {{.dp = 2, .tp = 2, .pp = 2}, kBoth},
                                          {{.dp = 4, .tp = 2}, kBoth},
                                          {{.dp = 2, .tp = 1, .pp = 2}, kDense},
                                          {{.dp = 2, .tp = 3, .micro_batches = 3}, kHead},
                                          {{.dp = 8, .tp = 1}, kBoth},
                                          {{.dp = 3, .tp = 2}, kDense}};
  const std::vector<std::string> families = golden_families(kGolden);
  const size_t family = std::ranges::find(families, GetParam()) - families.begin();
  for (size_t i = 0; i < cases.size(); ++i) {
    if ((i % 3 == family % 3) == is_long()) continue;
    const auto& [grid, divided] = cases[i];
    for (const int step_tokens : {64, 6}) {  // rows of all replicas in one piece, or in several
      const ModelOptions options = {
          .directory = directory,
          .isa = ties ? std::optional(cpu::Isa::kReference) : std::nullopt,
          .context = 256,
          .step_tokens = step_tokens,
          .max_logits = 64,
          .by_replicas = divided};
      on_grid(grid, options, [&](LoadedModel& loaded) {
        SCOPED_TRACE(fmt::format("{}, {} tokens", grid.name(), step_tokens));
        EXPECT_EQ(says(loaded.arithmetic(), ", dense layers divided by "), divided.dense);
        Engine engine(loaded.model(), loaded.cache(), {.size = loaded.config().vocab},
                      loaded.context(), {.max_running = 64, .keeps_pages = false});
        std::vector<Logits> got;
        std::vector<std::vector<float>> want;
        got.reserve(100);
        for (int copy = 0; copy < grid.dp; ++copy)
          for (const int length : {5, 17, 40}) {
            const std::string suffix = "_" + std::to_string(length);
            if (!golden.has("tokens" + suffix) || (length > 5 && copy % 2 == 1)) continue;
            want.push_back(golden.floats("logits" + suffix));
            const auto n_scored = std::ssize(want.back()) / loaded.config().vocab;
            submit_text(engine, golden.ints("tokens" + suffix), got.emplace_back(),
                        length - static_cast<int>(n_scored));
          }
        while (engine.step()) {
        }
        for (size_t text = 0; text < got.size(); ++text) {
          Logits rows(got[text].size());
          const int64_t vocab = loaded.config().vocab;
          ASSERT_EQ(std::ssize(got[text]) * vocab, std::ssize(want[text]));
          for (size_t row = 0; row < rows.size(); ++row)
            rows[row].assign(want[text].begin() + row * vocab,
                             want[text].begin() + (row + 1) * vocab);
          expect_close_logits(got[text], rows, ties ? 2e-4 : 3e-2);
        }
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, DividedByReplicas, testing::ValuesIn(golden_families(kGolden)),
                         [](const auto& info_of) { return info_of.param; });

// With drafts by the MTP layer, whose head is divided too, and sequences that begin and end.
TEST(RanksThatDivideByReplicas, GiveTheSameAnswers) {
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  const std::vector<Request> requests = sampled_questions(tokenizer, 7);
  ModelOptions options = tiny_r1(DeviceChoice::kCpu);
  options.max_logits = 16;
  LoadedModel one(options);
  const std::vector<std::vector<int32_t>> want = tokens_of(one, tokenizer, requests, 2);
  for (const auto& [grid, draft] :
       {std::pair{RankGrid{.dp = 2, .tp = 1}, DraftChoice::kMtp},
        std::pair{RankGrid{.dp = 2, .tp = 2}, DraftChoice::kAuto},
        std::pair{RankGrid{.dp = 2, .tp = 1, .pp = 2}, DraftChoice::kLookup}}) {
    options.draft = draft;
    options.by_replicas = kBoth;
    on_grid(grid, options, [&](LoadedModel& loaded) {
      SCOPED_TRACE(grid.name());
      EXPECT_EQ(tokens_of(loaded, tokenizer, requests, 2), want);
    });
  }
}

// What ranks divide is read once, and what replicas have is read by each.
TEST(RanksThatDivideByReplicas, ReadTheirPart) {
  const std::string directory = kGolden + "v3_bf16";
  const ModelConfig c = ModelConfig::from_directory(directory);
  const auto bytes_of = [&](const RankGrid& grid, SharedByReplicas divided) {
    ModelOptions options = {.directory = directory, .context = 256};
    if (divided.any()) options.by_replicas = divided;
    std::mutex mutex;
    int64_t bytes = 0;
    on_grid(
        grid, options, [](LoadedModel&) {},
        [&](LoadedModel& loaded, int) {
          const std::lock_guard lock(mutex);
          bytes += loaded.packed_bytes();
        });
    return bytes;
  };
  const int64_t head = int64_t{c.vocab} * c.dim * 2;
  int64_t dense = 0;
  for (int l = 0; l < c.n_layers; ++l)
    if (!c.is_moe(l)) dense += int64_t{3} * c.dim * c.dense_dim * 2;
  for (const int dp : {2, 4}) {
    const RankGrid grid = {.dp = dp, .tp = 1};
    const int64_t whole = bytes_of(grid, {});
    // Matrices are kept in whole lines of memory.
    EXPECT_NEAR(whole - bytes_of(grid, kHead), (dp - 1) * head, 0.02 * head);
    EXPECT_NEAR(whole - bytes_of(grid, kDense), (dp - 1) * dense, 0.02 * dense);
    EXPECT_NEAR(whole - bytes_of(grid, kBoth), (dp - 1) * (head + dense), 0.02 * (head + dense));
  }
}

TEST(RanksThatDivideByReplicas, AreRefusedWithoutReplicas) {
  EXPECT_TRUE(says(refusal_of_ranks(2,
                                    [](int) {
                                      return ModelOptions{.directory = kGolden + "v3_bf16",
                                                          .by_replicas = kBoth};
                                    }),
                   "--dp-divide: there is one replica of the backbone"));
}

}  // namespace
}  // namespace tandem::test
