#include "scheduling/expert_loads.h"

#include <algorithm>
#include <numeric>

#include "core/check.h"
#include "offload/balance/hot_experts.h"

namespace tandem {
namespace {

double share(double part, int64_t whole) {
  return whole > 0 ? part / static_cast<double>(whole) : 0;
}

double balancedness(std::span<const double> rows) {
  const double most = *std::max_element(rows.begin(), rows.end());
  const double sum = std::accumulate(rows.begin(), rows.end(), 0.0);
  return most > 0 ? sum / (static_cast<double>(rows.size()) * most) : 1;
}

}  // namespace

void ExpertHomes::apply(std::span<const ExpertChange> changes) {
  for (const ExpertChange& change : changes) {
    if (exchanges_with_gpu()) {
      on_gpu.at(change.layer).at(change.expert) = change.ranks.front() == kGpuOwner;
      continue;
    }
    std::vector<int>& of_expert = ranks.at(change.layer).at(change.expert);
    of_expert.assign(change.ranks.begin(), change.ranks.end());
    for (int& rank : of_expert) rank += static_cast<int>(ranks_of_layer[change.layer].first);
  }
}

ExpertLoads loads_of(const ExpertUses& uses, const ExpertHomes& homes) {
  const size_t n_layers = uses.of_layer.size();
  check(homes.ranks.size() == n_layers && homes.ranks_of_layer.size() == n_layers,
        "counts and homes of the same layers");
  ExpertLoads loads;
  loads.of_rank.resize(homes.n_ranks);
  int64_t n_rows = 0;
  double balanced_rows = 0, gpu_rows = 0;
  for (size_t l = 0; l < n_layers; ++l) {
    const std::vector<int64_t>& counts = uses.of_layer[l];
    const auto [first_rank, n_ranks] = homes.ranks_of_layer[l];
    std::vector<double> rows(n_ranks);
    double on_gpu = 0;
    for (size_t e = 0; e < counts.size(); ++e) {
      const std::vector<int>& ranks = homes.ranks[l][e];
      for (const int rank : ranks)
        rows.at(rank - first_rank) +=
            static_cast<double>(counts[e]) / static_cast<double>(ranks.size());
      if (!homes.on_gpu.empty() && homes.on_gpu[l][e]) on_gpu += static_cast<double>(counts[e]);
    }
    ExpertLoads::Layer& layer = loads.layers.emplace_back();
    layer.n_rows = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    layer.balancedness = balancedness(rows);
    layer.gpu_share = share(on_gpu, layer.n_rows);
    for (int64_t r = 0; r < n_ranks; ++r) loads.of_rank[first_rank + r] += rows[r];
    n_rows += layer.n_rows;
    balanced_rows += layer.balancedness * static_cast<double>(layer.n_rows);
    gpu_rows += on_gpu;
  }
  if (n_rows > 0) loads.balancedness = share(balanced_rows, n_rows);
  loads.gpu_share = share(gpu_rows, n_rows);
  return loads;
}

}  // namespace tandem
