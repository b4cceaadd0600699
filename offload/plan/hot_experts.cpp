#include "offload/plan/hot_experts.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace tandem {

HotExperts::HotExperts(const PlanInput& in, WeightFormat format, double tokens)
    : in_(in), format_(format) {
  const int n_experts = in.config.router.n_experts;
  for (int l = 0; l < in.config.n_layers; ++l)
    if (in.config.is_moe(l)) layers_.push_back(l);
  size_ = static_cast<int64_t>(layers_.size()) * n_experts;
  std::vector<int> order(n_experts);
  std::iota(order.begin(), order.end(), 0);
  order_.assign(in.routing.uniform() ? 1 : layers_.size(), order);
  if (in.routing.uniform()) return;
  chances_.reserve(size_);
  for (size_t i = 0; i < layers_.size(); ++i) {
    std::vector<double>& chance = chance_.emplace_back(n_experts);
    for (int e = 0; e < n_experts; ++e) chance[e] = in.routing.chance(layers_[i], e, tokens);
    std::stable_sort(order_[i].begin(), order_[i].end(),
                     [&](int a, int b) { return chance[a] > chance[b]; });
    chances_.insert(chances_.end(), chance.begin(), chance.end());
  }
  std::sort(chances_.begin(), chances_.end(), std::greater<>());
}

std::vector<LayerExperts> HotExperts::first(int64_t n, const std::vector<HotSeat>& seats) const {
  const auto n_layers = static_cast<int64_t>(layers_.size());
  std::vector<LayerExperts> layers;
  if (in_.routing.uniform()) {
    // Layers get equal numbers, the first `more` one extra; the seat of the first expert rotates.
    const int64_t each = n / n_layers, more = n % n_layers;
    const auto n_seats = static_cast<int64_t>(seats.size());
    const auto first_seat = [&](int64_t i) { return i * n_seats / n_layers; };
    for (int64_t i = 0; i < n_layers;) {
      int64_t end = i + 1;
      while (end < n_layers && (end < more) == (i < more) && first_seat(end) == first_seat(i))
        ++end;
      layers.push_back(layer(static_cast<int>(i), each + (i < more ? 1 : 0), seats));
      layers.back().last = layers_[end - 1];
      i = end;
    }
    return layers;
  }
  const double least = n == 0 ? 2 : chances_[n - 1];
  int64_t left = n;  // how many experts of exactly the chance `least` are still to be taken
  left -= std::lower_bound(chances_.begin(), chances_.end(), least, std::greater<>()) -
          chances_.begin();
  for (int i = 0; i < n_layers; ++i) {
    int64_t m = 0;
    for (const int e : order_[i]) {
      const double chance = chance_[i][e];
      if (chance < least || (chance == least && left == 0)) break;
      if (chance == least) --left;
      ++m;
    }
    layers.push_back(layer(i, m, seats));
  }
  return layers;
}

LayerExperts HotExperts::layer(int i, int64_t n, const std::vector<HotSeat>& seats) const {
  const bool uniform = in_.routing.uniform();
  const std::vector<int>& order = order_[uniform ? 0 : i];
  std::vector<ExpertGroup> groups(seats.size() + 1, ExpertGroup{{}, format_, {}});
  groups[0].owners = {{0, -1}};
  for (size_t s = 0; s < seats.size(); ++s) groups[s + 1].owners = {seats[s].gpu};
  std::vector<double> load(seats.size(), 0);
  std::vector<size_t> group_of(order.size(), 0);
  const size_t first_seat = i * seats.size() / layers_.size();
  for (int64_t j = 0; j < std::min<int64_t>(n, std::ssize(order)); ++j) {
    const double use = uniform ? 1 : chance_[i][order[j]];
    double least = 0;
    size_t to = 0;
    for (size_t turn = 0; turn < seats.size(); ++turn) {
      const size_t s =
          first_seat + turn < seats.size() ? first_seat + turn : first_seat + turn - seats.size();
      if (seats[s].part <= 0) continue;
      const double then = (load[s] + use) / seats[s].part;
      if (to == 0 || then < least - 1e-12) least = then, to = s + 1;
    }
    load[to - 1] += use;
    group_of[order[j]] = to;
  }
  for (size_t e = 0; e < group_of.size(); ++e)
    groups[group_of[e]].experts.push_back(static_cast<int>(e));
  std::erase_if(groups, [](const ExpertGroup& g) { return g.experts.empty(); });
  return {layers_[i], layers_[i], std::move(groups)};
}

}  // namespace tandem
