#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/plan_report.h"
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

}  // namespace tandem
