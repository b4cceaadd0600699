#include "offload/balance/hot_experts.h"

#include <algorithm>
#include <numeric>

namespace tandem {
namespace {

struct Exchange {
  int layer, to_gpu, to_host;
  double gain;
};

// Experts by use, the most used first; of equal ones those on the GPU, which then stay there.
std::vector<int> by_use(const SharedLayer& layer) {
  std::vector<int> order(layer.use.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return layer.use[a] != layer.use[b] ? layer.use[a] > layer.use[b]
                                        : layer.on_gpu[a] > layer.on_gpu[b];
  });
  return order;
}

void add_exchanges(const SharedLayer& layer, std::vector<Exchange>& all) {
  const std::vector<int> order = by_use(layer);
  std::vector<int> hot, cold;  // on the CPU, the most used first; on the GPU, the least used first
  for (const int e : order)
    if (!layer.on_gpu[e]) hot.push_back(e);
  for (auto e = order.rbegin(); e != order.rend(); ++e)
    if (layer.on_gpu[*e]) cold.push_back(*e);
  for (size_t i = 0; i < std::min(hot.size(), cold.size()); ++i) {
    const double hotter = layer.use[hot[i]], colder = layer.use[cold[i]];
    if (hotter <= 0 || hotter < kHotter * colder) return;
    all.push_back({layer.layer, hot[i], cold[i], hotter - colder});
  }
}

}  // namespace

GpuShareOfUses gpu_share_of_uses(std::span<const SharedLayer> layers) {
  double all = 0, now = 0, best = 0;
  for (const SharedLayer& layer : layers) {
    const std::vector<int> order = by_use(layer);
    auto n_left = std::count(layer.on_gpu.begin(), layer.on_gpu.end(), true);
    for (const int e : order) {
      all += layer.use[e];
      if (layer.on_gpu[e]) now += layer.use[e];
      if (n_left-- > 0) best += layer.use[e];
    }
  }
  return all > 0 ? GpuShareOfUses{now / all, best / all} : GpuShareOfUses{};
}

RebalancePlan plan_hot_experts(std::span<const SharedLayer> layers, int at_once) {
  RebalancePlan plan;
  std::vector<Exchange> exchanges;
  double all = 0, gain = 0;
  for (const SharedLayer& layer : layers) {
    const size_t n = exchanges.size();
    add_exchanges(layer, exchanges);
    plan.n_layers += exchanges.size() > n;
    all += std::accumulate(layer.use.begin(), layer.use.end(), 0.0);
  }
  std::stable_sort(exchanges.begin(), exchanges.end(),
                   [](const Exchange& a, const Exchange& b) { return a.gain > b.gain; });
  for (const Exchange& e : exchanges) {
    if (plan.waves.empty() || std::ssize(plan.waves.back()) >= 2 * at_once)
      plan.waves.emplace_back();
    plan.waves.back().push_back({e.layer, e.to_gpu, {kGpuOwner}});
    plan.waves.back().push_back({e.layer, e.to_host, {kHostOwner}});
    plan.n_arrivals += 2;
    gain += e.gain;
  }
  plan.before = gpu_share_of_uses(layers).now;
  plan.after = plan.before + (all > 0 ? gain / all : 0);
  return plan;
}

}  // namespace tandem
