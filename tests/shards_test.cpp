// Sets of experts that always answer together.
#include "offload/workers/shards.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "tests/error_of.h"

namespace tandem {
namespace {

TEST(Shards, AreTheCoarsestSetsWithTheSameOwners) {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    const int n_experts = 1 + static_cast<int>(random() % 20);
    std::vector<std::vector<bool>> owned(random() % 5);
    for (auto& of_worker : owned)
      for (int e = 0; e < n_experts; ++e) of_worker.push_back(random() % 3 > 0);
    const std::vector<Shard> shards = shards_of(owned, n_experts);
    std::vector<int> shard_of(n_experts, -1);
    std::set<std::vector<int>> owners;
    int last_first = -1;
    for (size_t s = 0; s < shards.size(); ++s) {
      ASSERT_FALSE(shards[s].experts.empty());
      EXPECT_GT(shards[s].experts.front(), last_first) << "in the order of their first experts";
      last_first = shards[s].experts.front();
      EXPECT_TRUE(std::is_sorted(shards[s].experts.begin(), shards[s].experts.end()));
      EXPECT_TRUE(owners.insert(shards[s].owners).second) << "two shards with the same owners";
      for (const int e : shards[s].experts) {
        EXPECT_EQ(shard_of[e], -1) << "in one shard";
        shard_of[e] = static_cast<int>(s);
        for (int w = 0; w < std::ssize(owned); ++w)
          EXPECT_EQ(owned[w][e], std::count(shards[s].owners.begin(), shards[s].owners.end(), w));
      }
    }
    EXPECT_EQ(std::count(shard_of.begin(), shard_of.end(), -1), 0);
  }
}

TEST(Shards, ListsOfExpertsAreText) {
  EXPECT_EQ(text_of_experts({0, 1, 2, 3, 8}), "0-3,8");
  EXPECT_EQ(text_of_experts({5}), "5");
  EXPECT_EQ(text_of_experts({}), "");
  const auto ids = [](const std::string& text) {
    std::vector<int> experts;
    const std::vector<bool> has = experts_from_text(text, 12, "--experts");
    for (int e = 0; e < 12; ++e)
      if (has[e]) experts.push_back(e);
    return text_of_experts(experts);
  };
  for (const char* text : {"0-3,8-11", "7", "0-11", "0,2,4"}) EXPECT_EQ(ids(text), text);
  EXPECT_EQ(ids("auto"), "0-11");
  EXPECT_EQ(ids("3,1-2,2"), "1-3");
  for (const char* text :
       {"", ",", "1,", "-", "1-", "-1", "3-1", "a", "1-2-3", "1 ", "99999999999", "int4"})
    EXPECT_TRUE(says(error_of([&] { ids(text); }), "name experts such as")) << text;
  EXPECT_TRUE(
      says(error_of([&] { ids("0-12"); }), "--experts 0-12: the model has experts 0 to 11"));
}

}  // namespace
}  // namespace tandem
