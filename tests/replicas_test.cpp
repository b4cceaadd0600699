// To which replica of the backbone a sequence is dealt.
#include "scheduling/replicas.h"

#include <gtest/gtest.h>

#include <numeric>

namespace tandem::test {
namespace {

std::vector<int32_t> numbers_of(int n, int first = 0) {
  std::vector<int32_t> tokens(n);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

Replicas replicas(int n, bool keeps_pages = true) {
  return {n, {.n_pages = 64, .max_tokens = 512, .max_running = 8, .keeps_pages = keeps_pages}};
}

// Computes what all replicas have to compute.
void step(Replicas& all) {
  for (int i = 0; i < all.n(); ++i)
    if (!all.at(i).plan().empty()) all.at(i).computed();
}

TEST(Replicas, SequencesGoWhereTheFewestTokensWait) {
  Replicas all = replicas(3);
  all.add(1, numbers_of(100), 1);
  all.add(2, numbers_of(300, 1000), 1);
  all.add(3, numbers_of(250, 2000), 1);
  EXPECT_EQ(all.replica_of(1), 0);
  EXPECT_EQ(all.replica_of(2), 1);
  EXPECT_EQ(all.replica_of(3), 2);
  all.add(4, numbers_of(10, 3000), 1);
  EXPECT_EQ(all.replica_of(4), 0) << "110 tokens wait there";
  all.add(5, numbers_of(200, 4000), 1);
  all.add(6, numbers_of(10, 5000), 1);
  EXPECT_EQ(all.replica_of(5), 0);
  EXPECT_EQ(all.replica_of(6), 2) << "250 wait there, 310 and 300 elsewhere";
}

TEST(Replicas, EquallyBusyOnesGetEquallyManySequences) {
  Replicas all = replicas(2, false);
  for (SequenceId id = 1; id <= 6; ++id) {
    all.add(id, numbers_of(7, static_cast<int>(id) * 100), 1);
    step(all);  // nothing waits
  }
  EXPECT_EQ(all.at(0).counts().n_running, 3);
  EXPECT_EQ(all.at(1).counts().n_running, 3);
}

TEST(Replicas, APromptFollowsItsPrefixUnlessThatWaitsLonger) {
  Replicas all = replicas(2);
  all.add(1, numbers_of(400), 1);
  EXPECT_EQ(all.replica_of(1), 0);
  step(all);
  all.remove(1);
  all.add(2, numbers_of(100, 5000), 1);  // equally far: the first
  EXPECT_EQ(all.replica_of(2), 0);
  all.add(3, numbers_of(400), 1);
  EXPECT_EQ(all.replica_of(3), 0) << "384 of 400 tokens are there, and 100 wait";
  all.add(4, numbers_of(300, 6000), 1);
  EXPECT_EQ(all.replica_of(4), 1);
  step(all);
  all.add(5, numbers_of(450, 7000), 1);
  all.add(6, numbers_of(400, 8000), 1);
  EXPECT_EQ(all.replica_of(5), 1);
  EXPECT_EQ(all.replica_of(6), 0);
  all.add(7, numbers_of(400), 1);
  EXPECT_EQ(all.replica_of(7), 0);
  all.forget_pages();
  all.add(8, numbers_of(400), 1);
  EXPECT_EQ(all.replica_of(8), 1) << "no prefix is left, 450 tokens wait there and 418 here";
}

// A sequence whose prompt's keys come from elsewhere is placed when they are asked for.
TEST(Replicas, SequencesThatAreExpectedCountAsOneToken) {
  Replicas all = replicas(2);
  for (SequenceId id = 1; id <= 5; ++id) {
    const std::vector<int32_t> prompt = numbers_of(300, static_cast<int>(id) * 1000);
    all.expect(id, all.best_for(prompt));
  }
  const std::vector<int> want = {0, 1, 0, 1, 0};
  for (SequenceId id = 1; id <= 5; ++id) EXPECT_EQ(all.expected_on(id), want[id - 1]) << id;
  EXPECT_TRUE(all.empty()) << "there is nothing to compute";
  EXPECT_EQ(all.best_for(numbers_of(9)), 1) << "two are expected there, and three on the first";
  all.dismiss(1);
  all.dismiss(3);
  all.dismiss(3);  // it was dismissed before
  EXPECT_EQ(all.best_for(numbers_of(9)), 0);
  all.add(4, numbers_of(300, 4000), 1);
  EXPECT_EQ(all.replica_of(4), 1) << "where it was expected";
  EXPECT_EQ(all.best_for(numbers_of(200)), 0);
  step(all);
  all.remove(4);
  EXPECT_EQ(all.best_for(numbers_of(9)), 0) << "one is expected on each";
  all.expect(8, 0);
  EXPECT_EQ(all.best_for(numbers_of(9)), 1) << "one that has come is not expected any more";
  all.dismiss(8);
  all.add(2, numbers_of(300, 2000), 1);
  EXPECT_EQ(all.replica_of(2), 1);
  step(all);
  all.add(6, numbers_of(300, 2000), 1);
  EXPECT_EQ(all.replica_of(6), 1) << "its prefix is there";
  all.add(7, numbers_of(30), 1);
  EXPECT_EQ(all.replica_of(7), 0) << "45 tokens wait on the second";
}

TEST(Replicas, CountsAreOfAllTogether) {
  Replicas all = replicas(3);
  EXPECT_TRUE(all.empty());
  for (SequenceId id = 1; id <= 4; ++id) all.add(id, numbers_of(70, static_cast<int>(id) * 100), 1);
  step(all);
  const Scheduler::Counts counts = all.counts();
  EXPECT_EQ(counts.n_running, 4);
  EXPECT_EQ(counts.n_pages, 3 * 64);
  EXPECT_EQ(counts.n_available_pages, 3 * 64 - 4 * 2);
  EXPECT_EQ(counts.n_prompt_tokens, 4 * 70);
  for (SequenceId id = 1; id <= 4; ++id) {
    EXPECT_FALSE(all.empty());
    EXPECT_EQ(all.of(id).tokens(id).front(), static_cast<int>(id) * 100);
    all.remove(id);
  }
  EXPECT_TRUE(all.empty());
  EXPECT_EQ(all.counts().n_available_pages, 3 * 64);
}

}  // namespace
}  // namespace tandem::test
