#include "offload/plan/assign.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <queue>

#include "core/check.h"

namespace tandem {
namespace {

using Shares = std::vector<std::vector<double>>;
using Owners = std::vector<std::vector<int>>;
using Seats = std::vector<ExpertSeat>;

std::vector<int> by_share(const std::vector<double>& shares) {
  std::vector<int> order(shares.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return shares[a] > shares[b]; });
  return order;
}

Owners hottest_first(const Shares& shares, const Seats& seats);

// Depth first over all experts, hottest first; gives up branches that cannot beat the best.
class ExactSearch {
 public:
  ExactSearch(const Shares& shares, const Seats& seats, const Owners& first)
      : seats_(seats),
        best_owners_(first),
        best_(assigned_seconds(shares, seats, first)),
        owners_(first),
        load_(shares.size(), std::vector<double>(seats.size(), 0)),
        left_(shares.size(), 0) {
    for (const ExpertSeat& seat : seats) slots_.push_back(seat.slots);
    for (const ExpertSeat& seat : seats) speed_ += 1 / seat.seconds_per_use;
    for (size_t l = 0; l < shares.size(); ++l)
      for (const int e : by_share(shares[l])) {
        items_.push_back({l, e, shares[l][e]});
        left_[l] += shares[l][e];
      }
  }
  Owners run() {
    visit(0);
    return best_owners_;
  }

 private:
  struct Item {
    size_t layer;
    int expert;
    double share;
  };

  // No layer can be faster than its busiest seat is already, nor than all seats sharing evenly.
  double bound() const {
    double sum = 0;
    for (size_t l = 0; l < load_.size(); ++l) {
      double busiest = 0, done = left_[l];
      for (size_t s = 0; s < seats_.size(); ++s) {
        busiest = std::max(busiest, load_[l][s]);
        done += load_[l][s] / seats_[s].seconds_per_use;
      }
      sum += std::max(busiest, done / speed_);
    }
    return sum;
  }

  void visit(size_t i) {
    const double least = bound();
    if (least >= best_) return;
    if (i == items_.size()) {
      best_ = least;
      best_owners_ = owners_;
      return;
    }
    const Item& item = items_[i];
    left_[item.layer] -= item.share;
    for (size_t s = 0; s < seats_.size(); ++s) {
      if (slots_[s] == 0) continue;
      const double before = load_[item.layer][s];
      load_[item.layer][s] += item.share * seats_[s].seconds_per_use;
      --slots_[s];
      owners_[item.layer][item.expert] = static_cast<int>(s);
      visit(i + 1);
      ++slots_[s];
      load_[item.layer][s] = before;
    }
    left_[item.layer] += item.share;
  }

  const Seats& seats_;
  Owners best_owners_;
  double best_;
  Owners owners_;
  std::vector<Item> items_;
  std::vector<int64_t> slots_;
  Shares load_;               // [layers][seats] seconds
  std::vector<double> left_;  // [layers] shares not yet seated
  double speed_ = 0;
};

}  // namespace

Owners assign_experts(const Shares& shares, const Seats& seats) {
  size_t n = 0;
  for (const auto& layer : shares) n += layer.size();
  check(!seats.empty() && seats[0].slots >= static_cast<int64_t>(n), "room for all");
  Owners owners = hottest_first(shares, seats);
  if (n > kExactExperts) return owners;
  return ExactSearch(shares, seats, owners).run();
}

double assigned_seconds(const Shares& shares, const Seats& seats, const Owners& owners) {
  double sum = 0;
  for (size_t l = 0; l < shares.size(); ++l) {
    std::vector<double> load(seats.size(), 0);
    for (size_t e = 0; e < shares[l].size(); ++e)
      load[owners[l][e]] += shares[l][e] * seats[owners[l][e]].seconds_per_use;
    sum += *std::max_element(load.begin(), load.end());
  }
  return sum;
}

Owners deal_experts(const std::vector<double>& shares, int n_ranks, int n_redundant) {
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
  // An expert with many copies has the fewest ranks to choose from.
  std::vector<int> order = by_share(a_copy);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return copies[a] > copies[b]; });

  const int slots = (n + n_redundant + n_ranks - 1) / n_ranks;
  std::vector<double> load(n_ranks, 0);
  std::vector<int> used(n_ranks, 0), ranks(n_ranks);
  Owners owners(n);
  for (const int e : order) {
    std::iota(ranks.begin(), ranks.end(), 0);
    std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) {
      const bool full_a = used[a] == slots, full_b = used[b] == slots;
      if (full_a != full_b) return full_b;
      return load[a] != load[b] ? load[a] < load[b] : used[a] < used[b];
    });
    for (int i = 0; i < copies[e]; ++i) {
      owners[e].push_back(ranks[i]);
      load[ranks[i]] += a_copy[e];
      ++used[ranks[i]];
      check(used[ranks[i]] <= slots, "a free slot for every copy");
    }
    std::sort(owners[e].begin(), owners[e].end());
  }
  return owners;
}

namespace {

Owners hottest_first(const Shares& shares, const Seats& seats) {
  struct Layer {
    std::vector<int> order;  // experts, hottest first
    size_t next = 0;
    std::vector<double> load;  // [seats] seconds
  };
  std::vector<int64_t> slots;
  for (const ExpertSeat& seat : seats) slots.push_back(seat.slots);
  Owners owners;
  std::vector<Layer> layers;
  for (const auto& layer : shares) {
    owners.emplace_back(layer.size(), 0);
    layers.push_back({by_share(layer), 0, std::vector<double>(seats.size(), 0)});
    for (const double share : layer) layers.back().load[0] += share * seats[0].seconds_per_use;
  }
  struct Move {
    double gain;
    size_t layer;
    int seat;
    bool operator<(const Move& o) const { return gain != o.gain ? gain < o.gain : layer > o.layer; }
  };
  // What leaving seat 0 brings the layer's next expert at its best seat.
  const auto best_move = [&](size_t l) {
    const Layer& layer = layers[l];
    Move best{0, l, 0};
    if (layer.next == layer.order.size()) return best;
    const double share = shares[l][layer.order[layer.next]];
    const double now = *std::max_element(layer.load.begin(), layer.load.end());
    for (int s = 1; s < static_cast<int>(seats.size()); ++s) {
      if (slots[s] == 0) continue;
      double then = 0;
      for (int o = 0; o < static_cast<int>(seats.size()); ++o)
        then = std::max(then, layer.load[o] + (o == s   ? share * seats[s].seconds_per_use
                                               : o == 0 ? -share * seats[0].seconds_per_use
                                                        : 0));
      // Equal gains go to the emptier seat.
      const bool better = now - then > best.gain || (now - then == best.gain && best.seat > 0 &&
                                                     layer.load[s] < layer.load[best.seat]);
      if (better) best = {now - then, l, s};
    }
    return best;
  };
  std::priority_queue<Move> moves;
  for (size_t l = 0; l < layers.size(); ++l) moves.push(best_move(l));
  while (!moves.empty()) {
    const Move top = moves.top();
    moves.pop();
    if (top.gain <= 0 || top.seat == 0) continue;
    Layer& layer = layers[top.layer];
    if (slots[top.seat] == 0) {
      moves.push(best_move(top.layer));
      continue;
    }
    const int e = layer.order[layer.next++];
    const double share = shares[top.layer][e];
    layer.load[0] -= share * seats[0].seconds_per_use;
    layer.load[top.seat] += share * seats[top.seat].seconds_per_use;
    --slots[top.seat];
    owners[top.layer][e] = top.seat;
    moves.push(best_move(top.layer));
  }
  return owners;
}

}  // namespace
}  // namespace tandem
