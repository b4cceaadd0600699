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
    std::vector<ExpertsOfLayers> in_layers;
    for (const auto& of_worker : owned) in_layers.push_back({of_worker, of_worker});
    const std::vector<Shard> shards = shards_of(in_layers, 2, n_experts);
    std::vector<int> shard_of(n_experts, -1);
    std::set<std::vector<int>> owners;
    int last_first = -1;
    for (size_t s = 0; s < shards.size(); ++s) {
      ASSERT_EQ(shards[s].experts.size(), 2u);
      EXPECT_EQ(shards[s].experts[0], shards[s].experts[1]);
      const std::vector<int>& experts = shards[s].experts[0];
      ASSERT_FALSE(experts.empty());
      EXPECT_GT(experts.front(), last_first) << "in the order of their first experts";
      last_first = experts.front();
      EXPECT_TRUE(std::is_sorted(experts.begin(), experts.end()));
      EXPECT_TRUE(owners.insert(shards[s].owners).second) << "two shards with the same owners";
      for (const int e : experts) {
        EXPECT_EQ(shard_of[e], -1) << "in one shard";
        shard_of[e] = static_cast<int>(s);
        for (int w = 0; w < std::ssize(owned); ++w)
          EXPECT_EQ(owned[w][e], std::count(shards[s].owners.begin(), shards[s].owners.end(), w));
      }
    }
    EXPECT_EQ(std::count(shard_of.begin(), shard_of.end(), -1), 0);
  }
}

// What moved in one layer is in other shards there only.
TEST(Shards, MayDifferFromLayerToLayer) {
  const ExpertsOfLayers first = {{true, true, false, false}, {true, false, false, true}},
                        second = {{false, false, true, false}, {false, true, true, false}};
  const std::vector<Shard> shards = shards_of({first, second}, 2, 4);
  ASSERT_EQ(shards.size(), 3u);
  using Layers = std::vector<std::vector<int>>;
  EXPECT_EQ(shards[0].experts, (Layers{{0, 1}, {0, 3}}));
  EXPECT_EQ(shards[1].experts, (Layers{{2}, {1, 2}}));
  EXPECT_EQ(shards[2].experts, (Layers{{3}, {}}));
  EXPECT_TRUE(shards[2].owners.empty());
  EXPECT_EQ(text_of_shard(shards[0]), "0-1,3, not all in every layer");
  EXPECT_EQ(text_of_layers(first), "0-1,3, not all in every layer");
  EXPECT_EQ(text_of_layers({first[0], first[0]}), "0-1");
  EXPECT_EQ(experts_of_shard(shards[0], 2, 4), first);
  EXPECT_EQ(experts_of_shard(shards[0], 3, 4).back(), std::vector<bool>(4));
  EXPECT_TRUE(has_one_of(second, shards[1]));
  EXPECT_FALSE(has_one_of(second, shards[0]));
  EXPECT_FALSE(has_one_of({}, shards[0]));
  EXPECT_EQ(layers_without(first, {{true, false, false, false}}),
            (ExpertsOfLayers{{false, true, false, false}, first[1]}));
  ExpertsOfLayers both = first;
  add_layers(second, both);
  EXPECT_EQ(n_of_all_layers(both), 7);
  ExpertsOfLayers none;
  EXPECT_FALSE(has_any(none));
  add_layers(second, none);
  EXPECT_EQ(none, second);
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
