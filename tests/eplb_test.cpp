// EPLB against the assignments of another implementation: tests/data/eplb.json has the example of
// its README, and loads with ties, of few and of 256 experts, hierarchical and global.
#include "offload/balance/eplb.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

namespace tandem {
namespace {

TEST(Eplb, IsTheirsBitForBit) {
  std::ifstream file(TANDEM_SOURCE_DIR "/tests/data/eplb.json");
  ASSERT_TRUE(file) << "tests/data/eplb.json is missing";
  const nlohmann::json cases = nlohmann::json::parse(file)["cases"];
  ASSERT_GE(cases.size(), 30u);
  for (const nlohmann::json& c : cases) {
    const EplbShape shape = {c["replicas"], c["groups"], c["nodes"], c["gpus"]};
    for (size_t layer = 0; layer < c["load"].size(); ++layer) {
      const auto load = c["load"][layer].get<std::vector<float>>();
      ASSERT_TRUE(takes(shape, static_cast<int>(load.size())));
      EXPECT_EQ(eplb(load, shape), c["expert_of_slot"][layer].get<std::vector<int>>())
          << shape.n_slots << " slots, " << shape.n_groups << " groups, " << shape.n_nodes
          << " nodes, " << shape.n_gpus << " GPUs, layer " << layer;
    }
  }
}

TEST(Eplb, TakesOnlySizesThatDivide) {
  EXPECT_TRUE(takes({288, 8, 4, 32}, 256));
  EXPECT_TRUE(takes({288, 8, 3, 96}, 256)) << "groups do not divide: global";
  EXPECT_FALSE(takes({280, 8, 4, 35}, 256)) << "GPUs of a node";
  EXPECT_FALSE(takes({287, 8, 4, 32}, 256)) << "slots of a GPU";
  EXPECT_FALSE(takes({224, 8, 4, 32}, 256)) << "fewer slots than experts";
  EXPECT_FALSE(takes({64, 6, 3, 32}, 40)) << "experts of a group";
}

}  // namespace
}  // namespace tandem
