// More of any resource never makes a plan slower in a fixed format: random models, machines,
// workloads and improvements.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "model/cost.h"
#include "tests/planner_cases.h"

namespace tandem {
namespace {

using Random = std::mt19937;

int whole(Random& rng, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(rng);
}
double real(Random& rng, double low, double high) {
  return std::uniform_real_distribution<double>(low, high)(rng);
}
template <class T>
T one_of(Random& rng, std::initializer_list<T> of) {
  return *(of.begin() + whole(rng, 0, static_cast<int>(of.size()) - 1));
}

Machine random_machine(Random& rng) {
  Machine m =
      known_machine(one_of(rng, {"12x8xh100", "16xh800", "2x6454s-4090", "2x6980p", "2x8452y-a100",
                                 "2x9654-5090", "8xh20-141g", "8xh20-96g", "8xh200",
                                 "desktop-192gb", "home-32x4090", "threadripper-4090"}));
  if (m.hosts > 1) m.hosts = whole(rng, 1, 6);
  if (!m.gpus.empty()) {
    m.gpus.resize(one_of<size_t>(rng, {1, 2, 3, 4, 6, 8}), m.gpus[0]);
    if (m.gpu_link.bytes_per_second == 0) m.gpu_link = {m.gpus[0].d2h_bytes_per_second, 10e-6};
    const double times = real(rng, 0.5, 2);
    for (Gpu& g : m.gpus) g.memory_bytes = static_cast<int64_t>(double(g.memory_bytes) * times);
  }
  return m;
}

Workload random_workload(Random& rng, const ModelConfig& c) {
  Workload w;
  w.prompt_tokens = one_of(rng, {64, 128, 1024, 3000});
  w.output_tokens = one_of(rng, {64, 256, 1024});
  w.context = one_of(rng, {4096, 8192, 16384});
  w.concurrency = one_of(rng, {0, 1, 2, 4, 16, 64, 256});
  w.objective = one_of(rng, {Objective::kLatency, Objective::kThroughput});
  if (w.concurrency == 0 && whole(rng, 0, 1) == 1) w.tokens_per_second_per_user = 10;
  w.experts =
      whole(rng, 0, 1) == 0 ? stored_expert_format(c) : WeightFormat{DType::kI4TwoLevel, 64};
  return w;
}

// Improves a random property of the machine and returns its name.
std::string improve(Random& rng, Machine& m) {
  const double times = one_of(rng, {1.01, 1.1, 1.5, 3.0});
  const auto more = [&](int64_t& bytes) { bytes = static_cast<int64_t>(double(bytes) * times); };
  const std::string by = fmt::format(" x{}", times);
  switch (whole(rng, 0, m.gpus.empty() ? 3 : 8)) {
    case 0:
      for (NumaNode& n : m.nodes) n.read_bytes_per_second *= times;
      m.cross_read_bytes_per_second *= times;
      return "memory bandwidth" + by;
    case 1:
      for (NumaNode& n : m.nodes) more(n.memory_bytes);
      return "memory" + by;
    case 2:
      for (double* p : {&m.peak.fp32, &m.peak.bf16, &m.peak.fp8, &m.peak.int8}) *p *= times;
      return "CPU arithmetic" + by;
    case 3:
      if (m.hosts == 1) m.network = {12.5e9, 10e-6};
      ++m.hosts;
      return "another host";
    case 4:
      for (Gpu& g : m.gpus) more(g.memory_bytes);
      return "GPU memory" + by;
    case 5:
      for (Gpu& g : m.gpus) g.read_bytes_per_second *= times;
      return "GPU bandwidth" + by;
    case 6:
      for (Gpu& g : m.gpus)
        for (double* p : {&g.peak.fp32, &g.peak.bf16, &g.peak.fp8, &g.peak.int8}) *p *= times;
      return "GPU arithmetic" + by;
    case 7:
      for (Gpu& g : m.gpus) g.h2d_bytes_per_second *= times, g.d2h_bytes_per_second *= times;
      m.gpu_link.bytes_per_second *= times;
      m.network.bytes_per_second *= times;
      return "links" + by;
    default:
      m.gpus.push_back(m.gpus[0]);
      return "another GPU a host";
  }
}

TEST(PlanMonotone, MoreOfAnythingIsNeverSlower) {
  const char* rounds = std::getenv("TANDEM_ROUNDS");
  const int n_rounds = rounds ? std::atoi(rounds) : 100;
  Random rng(7);
  int n_plans = 0, n_faster = 0;
  for (int round = 0; round < n_rounds; ++round) {
    const char* model = one_of(rng, {"v2-lite", "v2", "r1", "k2", "moonlight"});
    const ModelConfig config = known_model(model);
    const Machine machine = random_machine(rng);
    const Workload w = random_workload(rng, config);
    Machine better = machine;
    const std::string what = improve(rng, better);
    double before = 0, after = 0;
    bool met = false, meets = false;
    try {
      const Prediction p = Planned(model, machine, w).plan().prediction;
      before = p.score;
      met = p.tokens_per_second_per_user >= w.tokens_per_second_per_user;
    } catch (const Error&) {
      continue;  // does not fit
    }
    ++n_plans;
    const Prediction p = Planned(model, better, w).plan().prediction;
    after = p.score;
    meets = p.tokens_per_second_per_user >= w.tokens_per_second_per_user;
    n_faster += after < before * (1 - 1e-9);
    EXPECT_TRUE(meets > met || (meets == met && after <= before * (1 + 1e-9)))
        << round << ": " << what << ": " << model << " on " << machine.hosts << " x "
        << machine.gpus.size() << " " << machine.name << " in " << format_name(*w.experts)
        << " --ctx " << w.context << " --prompt " << w.prompt_tokens << " --output "
        << w.output_tokens << " --concurrency " << w.concurrency
        << (w.objective == Objective::kLatency ? " latency" : " throughput") << " user "
        << w.tokens_per_second_per_user << ": " << (after / before - 1) * 100 << " % slower";
  }
  EXPECT_GT(n_plans, n_rounds / 3);
  EXPECT_GT(n_faster, n_plans / 4);
}

}  // namespace
}  // namespace tandem
