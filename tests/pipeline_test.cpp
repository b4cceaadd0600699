// How a step is divided for the stages of a pipeline.
#include "engine/pipeline.h"

#include <gtest/gtest.h>

#include <numeric>

#include "engine/step_arrays.h"

namespace tandem::test {
namespace {

std::vector<int32_t> numbers(int n, int first = 0) {
  std::vector<int32_t> all(n);
  std::iota(all.begin(), all.end(), first);
  return all;
}

TEST(Pipeline, DividesWhatIsLongEnough) {
  const auto divides = [](BackboneGrid grid, int n_tokens, int n_replicas = 1) {
    StepArrays step(1024);
    const std::vector<int32_t> tokens = numbers(n_tokens), pages = numbers(16);
    step.add(tokens, pages, 0, n_tokens, 1);
    const std::vector<Batch> replicas(n_replicas, step.batch());
    return Pipeline(grid, 1024).divides(replicas);
  };
  EXPECT_FALSE(divides({1, 1, 1}, 512));
  EXPECT_FALSE(divides({1, 1, 2}, 127));
  EXPECT_TRUE(divides({1, 1, 2}, 128));
  EXPECT_TRUE(divides({1, 4, 2}, 512));
  EXPECT_TRUE(divides({2, 1, 2}, 512, 2));
}

// Pieces hold every token and row of logits once, in order, and what they attend to.
TEST(Pipeline, PiecesAreTheStep) {
  StepArrays step(1024);
  const std::vector<int32_t> first = numbers(300), second = numbers(200, 1000), pages = numbers(8),
                             other_pages = numbers(8, 20);
  step.add(first, pages, 100, 200, 150);
  step.add(second, other_pages, 0, 183, 2);
  const Batch whole = step.batch();
  for (const int n_stages : {2, 3, 8}) {
    Pipeline pipeline({1, 1, n_stages}, 1024);
    const auto pieces = pipeline.pieces_of(std::span(&whole, 1));
    EXPECT_EQ(pieces.size(), n_stages == 2 ? 4u : 5u) << "at least 64 tokens each";
    int n_tokens = 0;
    int64_t n_logits = 0;
    std::vector<int> n_of_sequence(2);
    for (const PipelinePiece& piece : pieces) {
      const Batch& b = piece.batches[0];
      EXPECT_EQ(piece.first_logits[0], n_logits);
      int end = 0;
      for (const Sequence& s : b.sequences) {
        EXPECT_EQ(s.first_token, end);
        end += s.n_tokens;
        const bool is_first = s.kv_pages.data() == pages.data();
        int& n_before = n_of_sequence[is_first ? 0 : 1];
        n_before += s.n_tokens;
        EXPECT_EQ(s.kv_length, (is_first ? 100 : 0) + n_before);
        EXPECT_EQ(s.kv_length, b.positions[s.first_token + s.n_tokens - 1] + 1);
      }
      EXPECT_EQ(end, b.n());
      for (int i = 0; i < b.n(); ++i) {
        EXPECT_EQ(b.tokens[i], whole.tokens[n_tokens + i]);
        EXPECT_EQ(b.positions[i], whole.positions[n_tokens + i]);
      }
      for (size_t i = 0; i < b.logit_rows.size(); ++i)
        EXPECT_EQ(b.logit_rows[i] + n_tokens, whole.logit_rows[n_logits + i]);
      n_tokens += b.n();
      n_logits += std::ssize(b.logit_rows);
    }
    EXPECT_EQ(n_tokens, whole.n());
    EXPECT_EQ(n_logits, std::ssize(whole.logit_rows));
  }
}

// The replica with the most tokens decides how many pieces all have.
TEST(Pipeline, ReplicasHaveAsManyPieces) {
  StepArrays longest(1024), decode(1024);
  const std::vector<int32_t> tokens = numbers(300), pages = numbers(8);
  longest.add(tokens, pages, 0, 300, 1);
  for (int i = 0; i < 3; ++i) decode.add(tokens, pages, 20 + i, 1, 1);
  const std::array<Batch, 3> replicas = {decode.batch(), longest.batch(), Batch{}};
  Pipeline pipeline({3, 1, 2}, 1024);
  const auto pieces = pipeline.pieces_of(replicas);
  ASSERT_EQ(pieces.size(), 4u);
  std::array<int, 3> n_tokens = {};
  std::array<int64_t, 3> n_logits = {};
  for (const PipelinePiece& piece : pieces)
    for (int r = 0; r < 3; ++r) {
      EXPECT_EQ(piece.first_logits[r], n_logits[r]);
      n_tokens[r] += piece.batches[r].n();
      n_logits[r] += std::ssize(piece.batches[r].logit_rows);
      EXPECT_EQ(std::ssize(piece.batches[r].sequences), r == 1 ? 1 : piece.batches[r].n());
    }
  EXPECT_EQ(n_tokens, (std::array{3, 300, 0}));
  EXPECT_EQ(n_logits, (std::array<int64_t, 3>{3, 1, 0}));
}

// A stage computes a step as many announcements later as its number, from copies of the arrays.
TEST(StageQueue, GivesEachStepToEachStageInItsTurn) {
  for (int stage = 0; stage < 4; ++stage) {
    StageQueue queue({2, 1, 4}, stage);
    for (int step = 0; step < 12; ++step) {
      {
        StepArrays arrays(64), other(64);  // which end with the announcement
        const std::vector<int32_t> tokens = numbers(20, 100 * step), pages = {step, step + 1},
                                   other_pages = {step + 50, 7};
        for (int i = 0; i < 1 + step % 3; ++i) arrays.add(tokens, pages, 5 + i, 1, 1);
        arrays.add(tokens, other_pages, 0, 3, 2);
        if (step % 4 == 3) other.add(tokens, pages, 0, 1, 0);
        const std::vector<Batch> replicas = {arrays.batch(), other.batch()};
        queue.push({replicas, 1 + step % 2});
      }
      const auto expect = [&](const StageQueue::Step& got, int number) {
        ASSERT_EQ(got.replicas.size(), 2u);
        const Batch &first = got.replicas[0], &second = got.replicas[1];
        if (number < 0) {
          EXPECT_EQ(first.n() + second.n(), 0);
          return;
        }
        EXPECT_EQ(got.n_micro_batches, 1 + number % 2);
        EXPECT_EQ(second.n(), number % 4 == 3);
        const int n_decoding = 1 + number % 3;
        ASSERT_EQ(std::ssize(first.sequences), n_decoding + 1);
        ASSERT_EQ(first.n(), n_decoding + 3);
        EXPECT_EQ(first.tokens[0], 100 * number + 5);
        EXPECT_EQ(first.positions[0], 5);
        EXPECT_EQ(first.tokens[n_decoding + 2], 100 * number + 2);
        EXPECT_EQ(std::ssize(first.logit_rows), n_decoding + 2);
        EXPECT_EQ(first.logit_rows[n_decoding], n_decoding + 1);
        for (int i = 0; i < n_decoding; ++i) {
          ASSERT_EQ(first.sequences[i].kv_pages.size(), 2u);
          EXPECT_EQ(first.sequences[i].kv_pages[1], number + 1);
          EXPECT_EQ(first.sequences[i].kv_length, 6 + i);
        }
        EXPECT_EQ(first.sequences[n_decoding].kv_pages[0], number + 50);
      };
      expect(queue.now(), step - stage);
      if (stage > 0) expect(queue.next(), step - stage + 1);
    }
    queue.clear();
    EXPECT_EQ(queue.now().replicas[0].n() + queue.next().replicas[1].n(), 0);
  }
}

}  // namespace
}  // namespace tandem::test
