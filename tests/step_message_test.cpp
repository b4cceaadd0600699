// Messages to the ranks of a model arrive as they were written.
#include "engine/step_message.h"

#include <gtest/gtest.h>

#include <random>

namespace tandem::test {
namespace {

struct Numbers {
  std::vector<std::vector<int32_t>> arrays;
  std::mt19937 random{7};
  std::span<const int32_t> some(int n) {
    std::vector<int32_t>& array = arrays.emplace_back();
    for (int i = 0; i < n; ++i) array.push_back(static_cast<int32_t>(random() % 100000) - 50000);
    return array;
  }
  int below(int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); }
};

void expect_same(std::span<const int32_t> a, std::span<const int32_t> b) {
  EXPECT_TRUE(std::ranges::equal(a, b));
}

StepMessage sent(const StepMessage& message, std::vector<int32_t>& numbers,
                 StepMessageReader& reader) {
  numbers = {1, 2, 3};
  write_message(message, numbers);
  EXPECT_EQ(numbers[0], std::ssize(numbers));
  return reader.read(numbers);
}

TEST(StepMessage, BatchesOfReplicas) {
  Numbers numbers;
  numbers.arrays.reserve(100000);
  std::vector<int32_t> written;
  StepMessageReader reader;
  for (int round = 0; round < 200; ++round) {
    std::vector<std::vector<Sequence>> sequences(numbers.below(5));
    std::vector<Batch> batches;
    for (auto& of_replica : sequences) {
      const int n = numbers.below(20);  // 0: the replica has nothing to compute
      for (int i = 0; n > 0 && i <= numbers.below(4); ++i)
        of_replica.push_back({numbers.below(9), numbers.below(9), numbers.below(999),
                              numbers.some(numbers.below(7))});
      batches.push_back({numbers.some(n), numbers.some(n), of_replica,
                         numbers.some(numbers.below(n + 1)), numbers.some(round % 2 == 0 ? 0 : n)});
    }
    const StepOrder order{.kind = StepOrder::Kind::kDraft,
                          .model = 1,
                          .module = 2,
                          .states = HiddenStates::kOfLogits};
    const StepMessage got = sent({.order = order, .batches = batches}, written, reader);
    EXPECT_EQ(got.order.kind, order.kind);
    EXPECT_EQ(got.order.model, 1);
    EXPECT_EQ(got.order.module, 2);
    EXPECT_EQ(got.order.states, HiddenStates::kOfLogits);
    EXPECT_TRUE(got.logits.empty());
    ASSERT_EQ(got.batches.size(), batches.size());
    for (size_t i = 0; i < batches.size(); ++i) {
      const Batch &a = got.batches[i], &b = batches[i];
      expect_same(a.tokens, b.tokens);
      expect_same(a.positions, b.positions);
      expect_same(a.logit_rows, b.logit_rows);
      expect_same(a.hidden_rows, b.hidden_rows);
      ASSERT_EQ(a.sequences.size(), b.sequences.size());
      for (size_t s = 0; s < a.sequences.size(); ++s) {
        EXPECT_EQ(a.sequences[s].first_token, b.sequences[s].first_token);
        EXPECT_EQ(a.sequences[s].n_tokens, b.sequences[s].n_tokens);
        EXPECT_EQ(a.sequences[s].kv_length, b.sequences[s].kv_length);
        expect_same(a.sequences[s].kv_pages, b.sequences[s].kv_pages);
      }
    }
  }
}

TEST(StepMessage, WantedLogits) {
  std::vector<int32_t> written;
  StepMessageReader reader;
  const std::vector<int32_t> copied = {0, 2, 3};
  const std::vector<Draw> draws = {{1, 0.5f, 0.25f, 0.125f, 7, 0.1}, {4, 0, 1, 0, 0, 1e-17}};
  const std::vector<LogitsWanted> wanted = {{copied, {}}, {}, {copied, draws}, {{}, draws}};
  const StepMessage got =
      sent({.order = {.kind = StepOrder::Kind::kLogits}, .logits = wanted}, written, reader);
  EXPECT_EQ(got.order.kind, StepOrder::Kind::kLogits);
  ASSERT_EQ(got.logits.size(), 4u);
  for (size_t i = 0; i < wanted.size(); ++i) {
    expect_same(got.logits[i].copied, wanted[i].copied);
    ASSERT_EQ(got.logits[i].draws.size(), wanted[i].draws.size());
    for (size_t k = 0; k < wanted[i].draws.size(); ++k) {
      const Draw &a = got.logits[i].draws[k], &b = wanted[i].draws[k];
      EXPECT_EQ(std::tie(a.row, a.temperature, a.top_p, a.min_p, a.top_k, a.uniform),
                std::tie(b.row, b.temperature, b.top_p, b.min_p, b.top_k, b.uniform));
    }
  }
}

TEST(StepMessage, AVocabularyAndPages) {
  std::vector<int32_t> written;
  StepMessageReader reader;
  const std::vector<uint32_t> allowed = {~0u, 0x80000001u, 5};
  const StepMessage got =
      sent({.order = {.kind = StepOrder::Kind::kVocabulary}, .vocabulary = {allowed, 70}}, written,
           reader);
  EXPECT_TRUE(std::ranges::equal(got.vocabulary.allowed, allowed));
  EXPECT_EQ(got.vocabulary.n_tokens, 70);
  const StepOrder copy{
      .kind = StepOrder::Kind::kCopyPage, .replica = 3, .copy = {17, 4, PageCopy::Way::kFromHost}};
  const StepOrder order = sent({.order = copy}, written, reader).order;
  EXPECT_EQ(order.replica, 3);
  EXPECT_EQ(order.copy.page, 17);
  EXPECT_EQ(order.copy.other, 4);
  EXPECT_EQ(order.copy.way, PageCopy::Way::kFromHost);
  for (const auto kind : {StepOrder::Kind::kReadPage, StepOrder::Kind::kWritePage}) {
    const StepOrder of_page =
        sent({.order = {.kind = kind, .replica = 2, .page = 123456}}, written, reader).order;
    EXPECT_EQ(of_page.kind, kind);
    EXPECT_EQ(of_page.replica, 2);
    EXPECT_EQ(of_page.page, 123456);
  }
}

TEST(StepMessage, ExpertsThatMove) {
  std::mt19937 random(9);
  StepMessageReader reader;
  std::vector<int32_t> written;
  for (int n = 0; n < 40; ++n) {
    std::vector<ExpertChange> changes;
    for (int i = 0; i < n; ++i) {
      ExpertChange& change = changes.emplace_back();
      change.layer = static_cast<int32_t>(random() % 61);
      change.expert = static_cast<int32_t>(random() % 256);
      for (unsigned rank = 0; rank < random() % 5; ++rank)
        change.ranks.push_back(static_cast<int32_t>(random() % 96));
    }
    const StepMessage got =
        sent({.order = {.kind = StepOrder::Kind::kLoadExperts, .model = n}, .changes = changes},
             written, reader);
    EXPECT_EQ(got.order.kind, StepOrder::Kind::kLoadExperts);
    EXPECT_EQ(got.order.model, n);
    EXPECT_TRUE(std::ranges::equal(got.changes, changes));
    EXPECT_TRUE(got.batches.empty());
  }
}

}  // namespace
}  // namespace tandem::test
