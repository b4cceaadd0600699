// Plans of small models against every other assignment of their experts.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "tests/planner_cases.h"

namespace tandem {
namespace {

// R1's layer shapes with one MoE layer of few experts.
ModelConfig small_model(int n_experts) {
  ModelConfig c = known_model("r1");
  c.n_dense_layers = 1;
  c.n_layers = 2;
  c.router.n_experts = n_experts;
  c.router.n_active = 2;
  c.router.n_groups = c.router.n_active_groups = 1;
  return c;
}

RoutingStatistics random_statistics(const ModelConfig& c, std::mt19937& rng) {
  constexpr double kTokens = 10'000;
  std::vector<double> wanted(c.router.n_experts);
  double sum = 0;
  for (double& w : wanted) sum += w = std::uniform_real_distribution<double>(0.2, 1)(rng);
  RoutingCounts counts(c);
  for (int e = 0; e < c.router.n_experts; ++e)
    counts.of_layer[1][e] =
        static_cast<int64_t>(std::ceil(kTokens * c.router.n_active * wanted[e] / sum));
  return {c, routing_statistics_json(c, counts), "s.json"};
}

// A machine whose GPUs have memory for the backbone and some experts.
Machine random_machine(const ModelConfig& c, int n_gpus, std::mt19937& rng) {
  const auto real = [&](double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(rng);
  };
  Machine m = round_machine();
  m.nodes[0].read_bytes_per_second = real(50e9, 800e9);
  m.one_thread_read_bytes_per_second = 10e9;
  Gpu& gpu = m.gpus[0];
  gpu.read_bytes_per_second = real(300e9, 3e12);
  gpu.memory_bytes = static_cast<int64_t>(real(8e9, 8e9 + 60e6 * c.router.n_experts));
  m.gpus.resize(n_gpus, gpu);
  if (n_gpus > 1) m.gpu_link = {real(20e9, 400e9), 5e-6};
  return m;
}

// The best score over all assignments of each expert to the CPU or a GPU of the backbone that fit;
// the rest is as placed.
double least_score(const PlanInput& in, const Placement& placement) {
  std::vector<DeviceId> devices = {{0, -1}};
  for (const DeviceId d : placement.stages[0].devices)
    if (!d.is_cpu()) devices.push_back(d);
  const auto n_devices = static_cast<int>(devices.size());
  const int n_experts = in.config.router.n_experts;
  const auto n_ways = static_cast<int64_t>(std::pow(n_devices, n_experts));
  Placement other = placement;
  double least = std::numeric_limits<double>::infinity();
  for (int64_t way = 0; way < n_ways; ++way) {
    std::vector<ExpertGroup> groups;
    for (int d = 0; d < n_devices; ++d) groups.push_back({{}, {DType::kF8E4M3}, {devices[d]}});
    int64_t rest = way;
    for (int e = 0; e < n_experts; ++e, rest /= n_devices)
      groups[rest % n_devices].experts.push_back(e);
    std::erase_if(groups, [](const ExpertGroup& g) { return g.experts.empty(); });
    other.layers = {{1, 1, groups}};
    const auto memory = memory_by_device(in.config, in.machine, other);
    if (std::all_of(memory.begin(), memory.end(),
                    [](const DeviceMemory& m) { return m.free_bytes() >= 0; }))
      least = std::min(least, predict(in, other).score);
  }
  return least;
}

TEST(PlanOptimality, NoOtherAssignmentOfExpertsIsFaster) {
  std::mt19937 rng(5);
  int n_on_both = 0;
  constexpr int kRounds = 40;
  for (int round = 0; round < kRounds; ++round) {
    const int n_devices = 2 + round % 2, n_experts = n_devices == 2 ? 12 : 8;
    const ModelConfig config = small_model(n_experts);
    const Machine machine = random_machine(config, n_devices - 1, rng);
    const RoutingStatistics routing = random_statistics(config, rng);
    const Workload w = {.context = 1024,
                        .prompt_tokens = 64,
                        .output_tokens = 512,
                        .experts = {},
                        .kv = {},
                        .redundant_experts = {},
                        .draft_tokens = {}};
    const Plan plan = tandem::plan({"small", config, machine, w, routing});
    n_on_both += plan.placement.layers[0].groups.size() > 1;
    const double least = least_score({config, machine, plan.workload, routing}, plan.placement);
    EXPECT_LE(plan.prediction.score, least * (1 + 1e-9)) << "round " << round;
  }
  EXPECT_GE(n_on_both, kRounds / 3);
}

}  // namespace
}  // namespace tandem
