#include "offload/plan/assign.h"

#include <algorithm>
#include <numeric>
#include <queue>
#include <tuple>

#include "core/check.h"
#include "core/rounding.h"

namespace tandem {
namespace {

using Owners = std::vector<std::vector<int>>;

std::vector<int> by_share(const std::vector<double>& shares) {
  std::vector<int> order(shares.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return shares[a] > shares[b]; });
  return order;
}

}  // namespace

Owners assign_experts(const std::vector<double>& shares, int n_ranks, int n_redundant) {
  const int n = static_cast<int>(shares.size());
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
  std::vector<double> a_copy(n);
  for (int e = 0; e < n; ++e) a_copy[e] = shares[e] / copies[e];
  // An expert with many replicas has the fewest ranks to choose from and is assigned first.
  std::vector<int> order = by_share(a_copy);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return copies[a] > copies[b]; });

  const int slots = ceil_div(n + n_redundant, n_ranks);
  // Ranks with free slots, the least loaded first.
  using Rank = std::tuple<double, int, int>;  // load, replicas held, number
  std::priority_queue<Rank, std::vector<Rank>, std::greater<>> ranks;
  for (int rank = 0; rank < n_ranks; ++rank) ranks.push({0, 0, rank});
  Owners owners(n);
  std::vector<Rank> taken;
  for (const int e : order) {
    taken.clear();
    for (int i = 0; i < copies[e]; ++i) {
      check(!ranks.empty(), "a free slot for every copy");
      taken.push_back(ranks.top());
      ranks.pop();
    }
    for (const auto& [load, used, rank] : taken) {
      owners[e].push_back(rank);
      if (used + 1 < slots) ranks.push({load + a_copy[e], used + 1, rank});
    }
    std::sort(owners[e].begin(), owners[e].end());
  }
  return owners;
}

}  // namespace tandem
