#include "offload/balance/rebalance.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <tuple>

#include "core/check.h"

namespace tandem {
namespace {

std::vector<int> slots_of(const OwnersOfLayer& owners, int n_ranks) {
  std::vector<int> slots(n_ranks);
  for (const std::vector<int>& ranks : owners)
    for (const int rank : ranks) ++slots[rank];
  return slots;
}

bool has(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

// The same assignment with other numbers for its ranks, within nodes: those with the most common
// experts become one. Nothing if a rank would get more experts than it has now.
std::optional<OwnersOfLayer> renumbered(const OwnersOfLayer& target, const OwnersOfLayer& now,
                                        int n_ranks, int n_nodes) {
  const std::vector<int> from = slots_of(target, n_ranks), room = slots_of(now, n_ranks);
  std::vector<std::vector<int>> common(n_ranks, std::vector<int>(n_ranks));
  for (size_t e = 0; e < now.size(); ++e)
    for (const int a : target[e])
      for (const int b : now[e]) ++common[a][b];
  // Those whose numbers of experts are the same come first, so that all find one.
  std::vector<std::tuple<int, int, int, int>> pairs;  // room left, -common, target's rank, now's
  for (int a = 0; a < n_ranks; ++a)
    for (int b = 0; b < n_ranks; ++b)
      if (a * n_nodes / n_ranks == b * n_nodes / n_ranks && from[a] <= room[b])
        pairs.emplace_back(room[b] - from[a], -common[a][b], a, b);
  std::sort(pairs.begin(), pairs.end());
  std::vector<int> number(n_ranks, -1);
  std::vector<bool> taken(n_ranks);
  int n_left = n_ranks;
  for (const auto& [left, n, a, b] : pairs) {
    if (number[a] >= 0 || taken[b]) continue;
    number[a] = b;
    taken[b] = true;
    --n_left;
  }
  if (n_left > 0) return {};
  OwnersOfLayer owners = target;
  for (std::vector<int>& ranks : owners) {
    for (int& rank : ranks) rank = number[rank];
    std::sort(ranks.begin(), ranks.end());
  }
  return owners;
}

RankLayout layout_of(const LayerUse& layer, const RebalanceLimits& limits) {
  const auto n = static_cast<int>(layer.ranks.n);
  const bool whole_hosts = limits.n_of_host < n && n % limits.n_of_host == 0;
  return {n, whole_hosts ? n / limits.n_of_host : 1, limits.n_groups};
}

// Experts of `target` that each rank does not have: [ranks]
std::vector<int> arrivals(const OwnersOfLayer& now, const OwnersOfLayer& target, int n_ranks) {
  std::vector<int> n(n_ranks);
  for (size_t e = 0; e < now.size(); ++e)
    for (const int rank : target[e]) n[rank] += !has(now[e], rank);
  return n;
}

// Changes of whole layers, as many at once as the ranks have room for.
class Waves {
 public:
  explicit Waves(std::vector<int> room) : room_(std::move(room)), left_(room_) {}
  void add(const LayerUse& layer, const OwnersOfLayer& target) {
    const std::vector<int> n = arrivals(layer.owners, target, static_cast<int>(layer.ranks.n));
    bool fits = !waves_.empty();
    for (size_t r = 0; r < n.size(); ++r) fits = fits && n[r] <= left_[layer.ranks.first + r];
    if (!fits) {
      waves_.emplace_back();
      left_ = room_;
    }
    for (size_t r = 0; r < n.size(); ++r) left_[layer.ranks.first + r] -= n[r];
    for (size_t e = 0; e < target.size(); ++e)
      if (target[e] != layer.owners[e])
        waves_.back().push_back(
            {layer.layer, static_cast<int32_t>(e), {target[e].begin(), target[e].end()}});
  }
  std::vector<std::vector<ExpertChange>> take() { return std::move(waves_); }

 private:
  const std::vector<int> room_;
  std::vector<int> left_;
  std::vector<std::vector<ExpertChange>> waves_;
};

// The experts that may move, and the ranks between which they do, numbered anew.
struct Movable {
  std::vector<LayerUse> layers;
  std::vector<std::vector<int>> experts;  // [layers] their numbers in the layer
  std::vector<int> ranks;                 // their numbers
};

Movable movable_of(const std::vector<LayerUse>& layers, const std::vector<bool>& fixed) {
  Movable movable;
  std::vector<int> number(fixed.size(), -1);
  for (size_t r = 0; r < fixed.size(); ++r) {
    if (fixed[r]) continue;
    number[r] = static_cast<int>(movable.ranks.size());
    movable.ranks.push_back(static_cast<int>(r));
  }
  const Slice ranks = {0, std::ssize(movable.ranks)};
  for (const LayerUse& layer : layers) {
    LayerUse& part = movable.layers.emplace_back(LayerUse{layer.layer, ranks, {}, {}});
    std::vector<int>& experts = movable.experts.emplace_back();
    for (size_t e = 0; e < layer.owners.size(); ++e) {
      std::vector<int> owners;
      for (const int rank : layer.owners[e]) owners.push_back(number[rank]);
      if (has(owners, -1)) continue;
      experts.push_back(static_cast<int>(e));
      part.owners.push_back(std::move(owners));
      part.use.push_back(layer.use[e]);
    }
  }
  return movable;
}

RebalancePlan plan_movable(const std::vector<LayerUse>& layers, const RebalanceLimits& limits) {
  const Movable movable = movable_of(layers, limits.fixed);
  if (movable.ranks.size() < 2) return {};
  RebalancePlan plan = plan_rebalance(movable.layers, {.least_gain = limits.least_gain});
  for (std::vector<ExpertChange>& wave : plan.waves)
    for (ExpertChange& change : wave) {
      const auto layer = std::find_if(layers.begin(), layers.end(), [&](const LayerUse& one) {
        return one.layer == change.layer;
      });
      change.expert = movable.experts[layer - layers.begin()][change.expert];
      for (int32_t& rank : change.ranks) rank = movable.ranks[rank];
    }
  return plan;
}

}  // namespace

OwnersOfLayer rebalanced(const OwnersOfLayer& now, const std::vector<double>& use,
                         const RankLayout& layout) {
  constexpr double kLessMoves = 0.01;
  int n_redundant = -static_cast<int>(now.size());
  for (const std::vector<int>& ranks : now) {
    if (ranks.empty()) return now;
    n_redundant += static_cast<int>(ranks.size());
  }
  const std::vector<int> slots = slots_of(now, layout.n_ranks);
  OwnersOfLayer best = now;
  level_loads(best, use, slots);
  double least = balancedness(best, use, layout.n_ranks) + kLessMoves;
  const auto consider = [&](const OwnersOfLayer& fresh, int n_nodes) {
    const auto numbered = renumbered(fresh, now, layout.n_ranks, n_nodes);
    if (!numbered || balancedness(*numbered, use, layout.n_ranks) <= least) return;
    best = *numbered;
    least = balancedness(best, use, layout.n_ranks);
  };
  consider(assign_experts(use, slots, n_redundant), 1);
  const BalancedOwners balanced = assign_balanced(use, layout, n_redundant);
  if (balanced.by_eplb) consider(balanced.owners, layout.n_nodes);
  return best;
}

std::vector<int> spare_slots(const std::vector<LayerUse>& layers) {
  std::vector<int> most;
  for (const LayerUse& layer : layers) {
    const std::vector<int> slots = slots_of(layer.owners, static_cast<int>(layer.ranks.n));
    most.resize(std::max<size_t>(most.size(), layer.ranks.first + slots.size()));
    for (size_t r = 0; r < slots.size(); ++r) {
      int& of_rank = most[layer.ranks.first + r];
      of_rank = std::max(of_rank, slots[r]);
    }
  }
  return most;
}

double movable_balancedness(const std::vector<LayerUse>& layers, const std::vector<bool>& fixed) {
  const Movable movable = movable_of(layers, fixed);
  const auto n = static_cast<int>(movable.ranks.size());
  double sum = 0, all = 0;
  for (const LayerUse& layer : movable.layers) {
    const double use = std::accumulate(layer.use.begin(), layer.use.end(), 0.0);
    all += use;
    if (use > 0) sum += use * balancedness(layer.owners, layer.use, n);
  }
  return all > 0 ? sum / all : 1;
}

RebalancePlan plan_rebalance(const std::vector<LayerUse>& layers, const RebalanceLimits& limits) {
  if (!limits.fixed.empty()) return plan_movable(layers, limits);
  RebalancePlan plan;
  Waves waves(spare_slots(layers));
  double before = 0, after = 0, all = 0;
  for (const LayerUse& layer : layers) {
    const double use = std::accumulate(layer.use.begin(), layer.use.end(), 0.0);
    if (use <= 0) continue;
    const RankLayout layout = layout_of(layer, limits);
    const double now = balancedness(layer.owners, layer.use, layout.n_ranks);
    const OwnersOfLayer target = rebalanced(layer.owners, layer.use, layout);
    const double then = balancedness(target, layer.use, layout.n_ranks);
    const bool changes = then - now >= limits.least_gain;
    all += use;
    before += use * now;
    after += use * (changes ? then : now);
    if (!changes) continue;
    const std::vector<int> n = arrivals(layer.owners, target, layout.n_ranks);
    plan.n_arrivals += std::accumulate(n.begin(), n.end(), int64_t{0});
    ++plan.n_layers;
    waves.add(layer, target);
  }
  plan.waves = waves.take();
  if (all > 0) plan.before = before / all, plan.after = after / all;
  return plan;
}

}  // namespace tandem
