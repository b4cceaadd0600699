#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/plan/plan_report.h"
#include "offload/balance/assign.h"

namespace tandem {

using Json = nlohmann::ordered_json;

std::vector<SimulatedVariant> simulate_variants(SimulatedCluster cluster) {
  constexpr int kLayers = 4;
  cluster.n_layers = kLayers;
  const int placed_copies = cluster.n_redundant;
  std::vector<SimulatedVariant> variants;
  for (const bool balanced : {false, true})
    for (const bool two_batches : {false, true}) {
      cluster.balanced = balanced;
      cluster.two_batches = two_batches;
      cluster.n_redundant = placed_copies;
      variants.push_back({balanced, two_batches, placed_copies, simulate(cluster)});
      if (!balanced || placed_copies > 0) continue;
      // Replicas spread the rows of the hottest experts, but must be read too.
      cluster.n_redundant = kUsualRedundancy;
      Simulation copied = simulate(cluster);
      if (copied.seconds < variants.back().simulation.seconds)
        variants.back() = {balanced, two_batches, kUsualRedundancy, std::move(copied)};
    }
  return variants;
}

Json simulation_report(const std::vector<SimulatedVariant>& variants) {
  Json report = Json::array();
  for (const SimulatedVariant& v : variants) {
    Json layers = Json::array();
    for (const SimulatedLayer& l : v.simulation.layers)
      layers.push_back({{"backbone_end_seconds", l.backbone_end},
                        {"dispatch_end_seconds", l.dispatch_end},
                        {"experts_end_seconds", l.experts_end},
                        {"combine_end_seconds", l.combine_end},
                        {"balance", l.balance}});
    report.push_back({{"balanced", v.balanced},
                      {"copies", v.n_copies},
                      {"two_batches", v.two_batches},
                      {"seconds", v.simulation.seconds},
                      {"compute_share", v.simulation.compute_share},
                      {"link_share", v.simulation.link_share},
                      {"layers", layers}});
  }
  return report;
}

std::string simulation_text(const SimulatedCluster& cluster,
                            const std::vector<SimulatedVariant>& variants) {
  std::string text = fmt::format(
      "simulated: {} ranks, {} of them with a backbone and {} tokens, routing with skew {:g}; "
      "times "
      "at which the last rank is done\n",
      cluster.n_ranks, cluster.n_backbone_ranks, cluster.tokens_per_rank, cluster.skew);
  for (const SimulatedVariant& v : variants)
    text += fmt::format("\nexperts {}, {} copies of hot ones, {}\n{}",
                        v.balanced ? "balanced by frequency" : "as placed", v.n_copies,
                        v.two_batches ? "two micro-batches overlap" : "one micro-batch",
                        simulation_text(v.simulation));
  return text;
}

Json faults_report(const FaultRun& run) {
  Json faults = Json::array();
  for (const SimulatedFault& f : run.faults) {
    faults.push_back({{"seconds", f.at},
                      {"host", f.host},
                      {"fault", name_of(f.fault)},
                      {"back_seconds", f.back_at},
                      {"step_seconds", f.step_seconds > 0 ? Json(f.step_seconds) : Json()}});
    if (f.standby >= 0) {
      faults.back()["standby"] = f.standby;
      faults.back()["loaded_seconds"] = f.loaded_at;
    }
  }
  return {{"seconds", run.seconds},
          {"tokens_per_second", run.tokens_per_second},
          {"tokens_per_second_without_faults", run.without_faults},
          {"longest_gap_seconds", run.longest_gap_seconds},
          {"p99_gap_seconds", run.p99_gap_seconds},
          {"lost_answers", run.n_lost},
          {"faults", faults},
          {"tokens_each_second", run.tokens_each_second}};
}

std::string faults_text(const FaultRun& run) {
  std::string text = fmt::format(
      "simulated   {} faults of workers in {:.0f} s: {:.2f} tokens/s, {:.2f} without faults; "
      "between two tokens of an answer at most {:.2f} s, {:.3f} in 99 of 100; {} answers lost\n"
      "{:>10}  {:<8}{:<10}{:>12}{:>22}\n",
      run.faults.size(), run.seconds, run.tokens_per_second, run.without_faults,
      run.longest_gap_seconds, run.p99_gap_seconds, run.n_lost, "s", "worker", "is", "back after s",
      "ms a step meanwhile");
  for (const SimulatedFault& f : run.faults)
    text += fmt::format(
        "{:>10.1f}  {:<8}{:<10}{:>12.1f}{:>22}{}\n", f.at, fmt::format("host{}", f.host),
        name_of(f.fault), f.back_at - f.at,
        f.step_seconds > 0 ? fmt::format("{:.2f}", f.step_seconds * 1e3) : "no other owner",
        f.standby < 0
            ? ""
            : fmt::format("; host{} has loaded after {:.1f} s", f.standby, f.loaded_at - f.at));
  return text;
}

}  // namespace tandem
