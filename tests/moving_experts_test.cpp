// Which placements have experts that can move while a server answers, and the memory for it.
#include "offload/plan/moving_experts.h"

#include <gtest/gtest.h>

#include "model/cost.h"
#include "tests/planner_cases.h"

namespace tandem {
namespace {

constexpr WeightFormat kFp8 = {DType::kF8E4M3};

std::vector<int> experts(int first, int end) {
  std::vector<int> ids;
  for (int e = first; e < end; ++e) ids.push_back(e);
  return ids;
}

// The backbone on `devices` as replicas, and for each layer these groups of experts.
Placement placed(std::vector<DeviceId> devices, std::vector<ExpertGroup> groups) {
  Placement p;
  p.backbone = kFp8;
  p.room_to_move = true;
  p.kv_tokens = 1024;
  p.stages = {{0, 60, std::move(devices), 1}};
  p.layers = {{3, 60, std::move(groups)}};
  return p;
}

constexpr DeviceId kCpu = {0, -1}, kGpu = {0, 0}, kSecondGpu = {0, 1}, kOtherHost = {1, -1};

TEST(MovingExperts, GpuAndTheCpuBesideItExchangeEight) {
  const Placement p =
      placed({kGpu}, {{experts(0, 20), kFp8, {kGpu}}, {experts(20, 256), kFp8, {kCpu}}});
  EXPECT_FALSE(why_experts_stay(p));
  EXPECT_EQ(spare_experts(p, kGpu), 8);
  EXPECT_EQ(spare_experts(p, kCpu), 8);
  EXPECT_EQ(spare_experts(p, kSecondGpu), 0);
}

TEST(MovingExperts, RanksKeepRoomForOneLayer) {
  Placement p = placed({kGpu, kSecondGpu}, {{experts(0, 100), kFp8, {kGpu}},
                                            {experts(100, 256), kFp8, {kSecondGpu}},
                                            {experts(0, 3), kFp8, {kSecondGpu}}});
  p.layers.push_back({70, 80, {{experts(0, 130), kFp8, {kGpu}}}});
  EXPECT_FALSE(why_experts_stay(p));
  EXPECT_EQ(spare_experts(p, kGpu), 130) << "the most of any layer";
  EXPECT_EQ(spare_experts(p, kSecondGpu), 159);
  const Placement hosts = placed({kCpu, kOtherHost}, {{experts(0, 128), kFp8, {kCpu}},
                                                      {experts(128, 256), kFp8, {kOtherHost}}});
  EXPECT_FALSE(why_experts_stay(hosts));
  EXPECT_EQ(spare_experts(hosts, kOtherHost), 128);
}

TEST(MovingExperts, SaysWhyTheyStay) {
  const auto why = [](std::vector<DeviceId> backbone, std::vector<ExpertGroup> groups) {
    return why_experts_stay(placed(std::move(backbone), std::move(groups))).value_or("they move");
  };
  const std::vector<int> some = experts(0, 100), others = experts(100, 256), all = experts(0, 256);
  EXPECT_EQ(why({kCpu}, {{all, kFp8, {kCpu}}}), "all of a layer are on one device");
  EXPECT_EQ(why({kGpu}, {{all, kFp8, {kGpu}}}), "all of a layer are on one device");
  EXPECT_EQ(why({kGpu, kSecondGpu}, {{all, kFp8, {kGpu, kSecondGpu}, true}}),
            "every device has columns of each");
  EXPECT_EQ(why({kGpu, kSecondGpu}, {{some, kFp8, {kGpu}}, {others, kFp8, {kCpu}}}),
            "GPUs have some, and CPUs the others");
  EXPECT_EQ(why({kGpu}, {{some, kFp8, {kGpu}}, {others, kFp8, {kOtherHost}}}),
            "workers keep theirs");
  EXPECT_EQ(why({kGpu, {1, 0}}, {{some, kFp8, {kCpu}}, {others, kFp8, {kOtherHost}}}),
            "they are on the CPUs of ranks with GPUs");
  Placement dense = placed({kCpu}, {});
  dense.layers.clear();
  EXPECT_EQ(why_experts_stay(dense), "the model has none");
}

// Memory is kept in the widest format of a device's experts, and only where they can move.
TEST(MovingExperts, MemoryIsKeptInTheWidestFormat) {
  const Planned planned("r1", known_machine("2x6454s-4090"));
  const WeightFormat int8 = {DType::kI8};
  Placement p = placed({kGpu}, {{experts(0, 5), kFp8, {kGpu}},
                                {experts(5, 100), int8, {kCpu}},
                                {experts(100, 256), kFp8, {kCpu}}});
  const auto spare = [&](int device) {
    return memory_by_device(planned.config, planned.machine, p)[device].spare_bytes;
  };
  ASSERT_LT(routed_expert_bytes(planned.config, kFp8) * 8,
            routed_expert_bytes(planned.config, int8) * 8);
  EXPECT_EQ(spare(0), 8 * routed_expert_bytes(planned.config, int8));
  EXPECT_EQ(spare(1), 8 * routed_expert_bytes(planned.config, kFp8));
  p.room_to_move = false;
  EXPECT_EQ(spare(0), 0);
  p.room_to_move = true;
  p.layers[0].groups = {{experts(0, 256), kFp8, {kCpu}}};
  EXPECT_EQ(spare(0), 0) << "they cannot move";
}

}  // namespace
}  // namespace tandem
