#include "offload/plan/expert_load.h"

#include <algorithm>
#include <cmath>

#include "offload/plan/cost.h"

namespace tandem {
namespace {

// Use of a group's experts in one step: expected number used, its variance, and rows of tokens.
struct Use {
  double used = 0, variance = 0, rows = 0;
};

template <class EvenChance>
Use use_of(const PlanInput& in, const ExpertGroup& group, int layer, double tokens,
           const EvenChance& even_chance) {
  const double replicas = group.sliced ? 1 : static_cast<double>(group.owners.size());
  Use use;
  const auto add = [&](double share, double chance, double n) {
    use.used += n * chance;
    use.variance += n * chance * (1 - chance);
    use.rows += n * tokens * share / replicas;
  };
  if (in.routing.uniform()) {
    add(in.routing.share(layer, 0), even_chance(replicas),
        static_cast<double>(group.experts.size()));
    return use;
  }
  const std::vector<double>* known =
      in.known ? &in.known->of(in.routing, layer, tokens, in.config.router.n_experts) : nullptr;
  for (const int e : group.experts) {
    const double share = in.routing.share(layer, e);
    const double chance = replicas != 1 ? chance_of_use(share / replicas, tokens)
                          : known       ? (*known)[e]
                                        : in.routing.chance(layer, e, tokens);
    add(share, chance, 1);
  }
  return use;
}

// Estimated largest of n draws from a normal distribution, clamped to [least, most].
double largest(double mean, double variance, double n, double least, double most) {
  if (n <= 1) return mean;
  return std::clamp(mean + std::sqrt(2 * variance * std::log(n)), std::min(least, most), most);
}

}  // namespace

std::vector<ExpertLoad> expert_loads(const PlanInput& in, const Placement& p,
                                     const LayerExperts& experts, int layer, double tokens,
                                     DeviceId backbone) {
  const int n_gpus = static_cast<int>(in.machine.gpus.size());
  std::vector<int> index(static_cast<size_t>(in.machine.hosts) * (n_gpus + 1), -1);
  const double expert_ops = token_ops(in.config).expert;
  const Rates cpu = rates_of(in.machine, {0, -1}, p.numa_columns);
  const Rates gpu = n_gpus > 0 ? rates_of(in.machine, {0, 0}, {}) : cpu;
  // Caches the chance under even routing: most groups have as many owners as the one before.
  double known_replicas = 0, known_chance = 0;
  const auto even_chance = [&](double replicas) {
    if (replicas != known_replicas)
      known_chance = chance_of_use(in.routing.share(layer, 0) / replicas, tokens);
    known_replicas = replicas;
    return known_chance;
  };
  std::vector<ExpertLoad> loads;
  for (const ExpertGroup& group : experts.groups) {
    const Use use = use_of(in, group, layer, tokens, even_chance);
    const double slices = group.sliced ? static_cast<double>(group.owners.size()) : 1;
    const auto bytes = static_cast<double>(routed_expert_bytes(in.config, group.format)) / slices;
    const double ops = use.rows * expert_ops / slices;
    for (const DeviceId d : group.owners) {
      int& i = index[d.host * (n_gpus + 1) + d.gpu + 1];
      if (i < 0) {
        i = static_cast<int>(loads.size());
        loads.push_back({.owner = d});
      }
      ExpertLoad& load = loads[i];
      load.experts += static_cast<double>(group.experts.size());
      load.used += use.used;
      load.variance += use.variance;
      load.rows += use.rows;
      load.bytes += use.used * bytes;
      load.op_seconds += ops / peak_for(d.is_cpu() ? cpu : gpu, group.format.dtype, !d.is_cpu());
      if (!backbone.is_cpu())
        load.stream_op_seconds += ops / peak_for(gpu, group.format.dtype, true);
      load.format = group.format.dtype;
    }
  }
  return loads;
}

bool alike(const ExpertLoad& a, const ExpertLoad& b) {
  return a.owner.is_cpu() == b.owner.is_cpu() && a.experts == b.experts && a.used == b.used &&
         a.variance == b.variance && a.rows == b.rows && a.bytes == b.bytes &&
         a.op_seconds == b.op_seconds && a.format == b.format;
}

double busiest_seconds(const Rates& rates, const ExpertLoad& load, int n_alike) {
  if (load.used <= 0) return 0;
  const double used = largest(load.used, load.variance, n_alike, 1, load.experts);
  const double rows = largest(load.rows, load.rows, n_alike, used, 1e300);
  return together(rates, load.bytes / rates.read_bytes_per_second * used / load.used,
                  load.op_seconds * rows / load.rows) /
         product_ratio(rates.kind, Product::kExperts, load.format, rows / used, rates.measured);
}

}  // namespace tandem
