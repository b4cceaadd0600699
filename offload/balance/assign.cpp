#include "offload/balance/assign.h"

#include <algorithm>
#include <numeric>
#include <queue>
#include <tuple>

#include "core/check.h"
#include "core/rounding.h"
#include "offload/balance/eplb.h"

namespace tandem {
namespace {

std::vector<int> by_share(const std::vector<double>& shares) {
  std::vector<int> order(shares.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return shares[a] > shares[b]; });
  return order;
}

// One of each expert, and `n_redundant` more of those with the most load a copy.
std::vector<int> copies_of(const std::vector<double>& shares, int n_ranks, int n_redundant) {
  const auto n = static_cast<int>(shares.size());
  check(n_redundant >= 0 && n_redundant <= n * (n_ranks - 1), "redundant experts");
  std::vector<int> copies(n, 1);
  const auto less_loaded = [&](int a, int b) {
    const double x = shares[a] / copies[a], y = shares[b] / copies[b];
    return x != y ? x < y : a > b;
  };
  std::priority_queue<int, std::vector<int>, decltype(less_loaded)> hottest(less_loaded);
  for (int e = 0; e < n; ++e)
    if (n_ranks > 1) hottest.push(e);
  for (int i = 0; i < n_redundant; ++i) {
    const int e = hottest.top();
    hottest.pop();
    if (++copies[e] < n_ranks) hottest.push(e);
  }
  return copies;
}

std::vector<double> loads_of(const OwnersOfLayer& owners, const std::vector<double>& shares,
                             int n_ranks) {
  std::vector<double> load(n_ranks, 0);
  for (size_t e = 0; e < owners.size(); ++e)
    for (const int rank : owners[e])
      load[rank] += shares[e] / static_cast<double>(owners[e].size());
  return load;
}

// Swaps replicas of the busiest rank with others, or moves them to free slots, as long as that
// lowers the larger load of the two ranks.
class LoadLeveller {
 public:
  LoadLeveller(OwnersOfLayer& owners, const std::vector<double>& shares, std::vector<int> slots)
      : owners_(owners),
        load_(loads_of(owners, shares, static_cast<int>(slots.size()))),
        held_(slots.size()),
        has_(slots.size(), std::vector<bool>(owners.size())),
        slots_(std::move(slots)) {
    for (size_t e = 0; e < owners.size(); ++e) {
      of_replica_.push_back(shares[e] / static_cast<double>(owners[e].size()));
      for (const int rank : owners[e]) add(rank, static_cast<int>(e));
    }
  }
  void run() {
    const int most = 4 * static_cast<int>(of_replica_.size());
    for (int i = 0; i < most && improve(); ++i) continue;
    for (std::vector<int>& ranks : owners_) ranks.clear();
    for (size_t rank = 0; rank < held_.size(); ++rank)
      for (const int e : held_[rank]) owners_[e].push_back(static_cast<int>(rank));
  }

 private:
  static constexpr int kFreeSlot = -1;
  // Expert `mine` of the busiest rank for `theirs` of `rank`.
  struct Swap {
    int mine, theirs, rank;
    double larger;  // load of the two ranks then
  };
  bool improve() {
    const auto busiest =
        static_cast<int>(std::max_element(load_.begin(), load_.end()) - load_.begin());
    const double mean = std::accumulate(load_.begin(), load_.end(), 0.0) / std::ssize(load_);
    Swap best = {0, 0, -1, load_[busiest] - 1e-6 * mean};
    for (const int mine : held_[busiest])
      for (int rank = 0; rank < std::ssize(held_); ++rank) {
        if (rank == busiest || has_[rank][mine]) continue;
        if (std::ssize(held_[rank]) < slots_[rank])
          consider({mine, kFreeSlot, rank, 0}, busiest, best);
        for (const int theirs : held_[rank])
          if (!has_[busiest][theirs]) consider({mine, theirs, rank, 0}, busiest, best);
      }
    if (best.rank < 0) return false;
    const double moved = of_replica_[best.mine] - load_for(best.theirs);
    load_[busiest] -= moved;
    load_[best.rank] += moved;
    remove(busiest, best.mine);
    add(best.rank, best.mine);
    if (best.theirs == kFreeSlot) return true;
    remove(best.rank, best.theirs);
    add(busiest, best.theirs);
    return true;
  }
  void add(int rank, int expert) {
    held_[rank].push_back(expert);
    has_[rank][expert] = true;
  }
  void remove(int rank, int expert) {
    std::erase(held_[rank], expert);
    has_[rank][expert] = false;
  }
  void consider(Swap swap, int busiest, Swap& best) const {
    const double moved = of_replica_[swap.mine] - load_for(swap.theirs);
    swap.larger = std::max(load_[busiest] - moved, load_[swap.rank] + moved);
    if (swap.larger < best.larger) best = swap;
  }
  double load_for(int expert) const { return expert == kFreeSlot ? 0 : of_replica_[expert]; }

  OwnersOfLayer& owners_;
  std::vector<double> load_;            // [ranks]
  std::vector<double> of_replica_;      // [experts]
  std::vector<std::vector<int>> held_;  // [ranks] experts
  std::vector<std::vector<bool>> has_;  // [ranks][experts]
  const std::vector<int> slots_;        // [ranks]
};

// Replicas for the experts with the most load a replica, each on the least loaded rank that has a
// free slot and not the expert, until all slots are filled or no such rank is left.
void fill_slots(OwnersOfLayer& owners, const std::vector<double>& shares, std::vector<int> slots) {
  const auto n_ranks = static_cast<int>(slots.size());
  int n_free = std::accumulate(slots.begin(), slots.end(), 0);
  for (const std::vector<int>& ranks : owners)
    for (const int rank : ranks) --slots[rank], --n_free;
  for (; n_free > 0; --n_free) {
    const std::vector<double> load = loads_of(owners, shares, n_ranks);
    int expert = -1, to = -1;
    double most = -1;
    for (int e = 0; e < std::ssize(owners); ++e) {
      const double of_replica = shares[e] / static_cast<double>(owners[e].size());
      if (of_replica <= most) continue;
      int best = -1;
      for (int rank = 0; rank < n_ranks; ++rank) {
        const bool free = slots[rank] > 0 &&
                          std::find(owners[e].begin(), owners[e].end(), rank) == owners[e].end();
        if (free && (best < 0 || load[rank] < load[best])) best = rank;
      }
      if (best >= 0) expert = e, to = best, most = of_replica;
    }
    if (expert < 0) return;
    owners[expert].insert(std::upper_bound(owners[expert].begin(), owners[expert].end(), to), to);
    --slots[to];
  }
}

// An expert that EPLB gives a rank twice is there once; the slots that this frees are filled.
OwnersOfLayer owners_by_eplb(const std::vector<double>& shares, const EplbShape& shape) {
  const std::vector<float> load(shares.begin(), shares.end());
  const std::vector<int> expert_of_slot = eplb(load, shape);
  OwnersOfLayer owners(shares.size());
  for (int slot = 0; slot < shape.n_slots; ++slot) {
    std::vector<int>& ranks = owners[expert_of_slot[slot]];
    const int rank = slot / (shape.n_slots / shape.n_gpus);
    if (ranks.empty() || ranks.back() != rank) ranks.push_back(rank);
  }
  fill_slots(owners, shares, std::vector<int>(shape.n_gpus, shape.n_slots / shape.n_gpus));
  return owners;
}

int replicas_of(const OwnersOfLayer& owners) {
  int n = 0;
  for (const std::vector<int>& ranks : owners) n += static_cast<int>(ranks.size());
  return n;
}

}  // namespace

OwnersOfLayer assign_experts(const std::vector<double>& shares, int n_ranks, int n_redundant) {
  const int slots = ceil_div(static_cast<int>(shares.size()) + n_redundant, n_ranks);
  return assign_experts(shares, std::vector<int>(n_ranks, slots), n_redundant);
}

OwnersOfLayer assign_experts(const std::vector<double>& shares, const std::vector<int>& slots,
                             int n_redundant) {
  const int n = static_cast<int>(shares.size()), n_ranks = static_cast<int>(slots.size());
  const std::vector<int> copies = copies_of(shares, n_ranks, n_redundant);
  std::vector<double> a_copy(n);
  for (int e = 0; e < n; ++e) a_copy[e] = shares[e] / copies[e];
  // An expert with many replicas has the fewest ranks to choose from and is assigned first.
  std::vector<int> order = by_share(a_copy);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return copies[a] > copies[b]; });

  // Ranks with free slots, the least loaded first.
  using Rank = std::tuple<double, int, int>;  // load, replicas held, number
  std::priority_queue<Rank, std::vector<Rank>, std::greater<>> ranks;
  for (int rank = 0; rank < n_ranks; ++rank)
    if (slots[rank] > 0) ranks.push({0, 0, rank});
  OwnersOfLayer owners(n);
  std::vector<Rank> taken;
  for (const int e : order) {
    taken.clear();
    for (int i = 0; i < copies[e] && !ranks.empty(); ++i) {
      taken.push_back(ranks.top());
      ranks.pop();
    }
    for (const auto& [load, used, rank] : taken) {
      owners[e].push_back(rank);
      if (used + 1 < slots[rank]) ranks.push({load + a_copy[e], used + 1, rank});
    }
    check(!owners[e].empty(), "a slot for every expert");
    std::sort(owners[e].begin(), owners[e].end());
  }
  // Where ranks have different numbers of slots, too few of them may have been left for a replica.
  if (replicas_of(owners) < n + n_redundant) fill_slots(owners, shares, slots);
  level_loads(owners, shares, slots);
  return owners;
}

OwnersOfLayer assign_by_speed(const std::vector<double>& shares, const std::vector<double>& speeds,
                              std::vector<int> slots, int n_redundant) {
  const int n = static_cast<int>(shares.size()), n_ranks = static_cast<int>(slots.size());
  const std::vector<int> copies = copies_of(shares, n_ranks, n_redundant);
  check(std::accumulate(slots.begin(), slots.end(), int64_t{0}) >= n, "a slot for every expert");
  std::vector<double> a_copy(n), load(n_ranks, 0);
  for (int e = 0; e < n; ++e) a_copy[e] = shares[e] / copies[e];
  OwnersOfLayer owners(n);
  const auto add_copy = [&](int e) {
    int best = -1;
    const auto end_of = [&](int rank) { return (load[rank] + a_copy[e]) / speeds[rank]; };
    for (int rank = 0; rank < n_ranks; ++rank)
      if (slots[rank] > 0 && (best < 0 || end_of(rank) < end_of(best)) &&
          std::find(owners[e].begin(), owners[e].end(), rank) == owners[e].end())
        best = rank;
    if (best < 0) return;
    owners[e].insert(std::upper_bound(owners[e].begin(), owners[e].end(), best), best);
    load[best] += a_copy[e];
    --slots[best];
  };
  const std::vector<int> order = by_share(a_copy);
  for (const int e : order) add_copy(e);  // every expert has a place before any has two
  for (const int e : order)
    for (int i = 1; i < copies[e]; ++i) add_copy(e);
  return owners;
}

std::vector<int> counts_by_speed(const std::vector<double>& speeds, const std::vector<int>& most,
                                 int total) {
  std::vector<int> counts(speeds.size(), 0);
  for (; total > 0; --total) {
    int best = -1;
    const auto end_of = [&](int i) { return (counts[i] + 1) / speeds[i]; };
    for (int i = 0; i < std::ssize(counts); ++i)
      if (counts[i] < most[i] && (best < 0 || end_of(i) < end_of(best))) best = i;
    if (best < 0) break;
    ++counts[best];
  }
  return counts;
}

void level_loads(OwnersOfLayer& owners, const std::vector<double>& shares,
                 const std::vector<int>& slots) {
  LoadLeveller(owners, shares, slots).run();
}

double balancedness(const OwnersOfLayer& owners, const std::vector<double>& shares, int n_ranks) {
  const std::vector<double> load = loads_of(owners, shares, n_ranks);
  const double most = *std::max_element(load.begin(), load.end());
  return most > 0 ? std::accumulate(load.begin(), load.end(), 0.0) / n_ranks / most : 1;
}

BalancedOwners assign_balanced(const std::vector<double>& shares, const RankLayout& layout,
                               int n_redundant) {
  const int n = static_cast<int>(shares.size());
  BalancedOwners best = {assign_experts(shares, layout.n_ranks, n_redundant)};
  best.own = balancedness(best.owners, shares, layout.n_ranks);
  const EplbShape shape = {n + n_redundant, layout.n_groups, layout.n_nodes, layout.n_ranks};
  if (layout.n_ranks == 1 || !takes(shape, n)) return best;
  OwnersOfLayer theirs = owners_by_eplb(shares, shape);
  best.eplb = balancedness(theirs, shares, layout.n_ranks);
  best.by_eplb = best.eplb > best.own;
  if (best.by_eplb) best.owners = std::move(theirs);
  return best;
}

}  // namespace tandem
