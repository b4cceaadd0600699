#include "offload/balance/eplb.h"

#include <algorithm>
#include <numeric>

#include "core/check.h"

namespace tandem {
namespace {

// Pack and place within it of each item.
struct Packed {
  std::vector<int> pack, place;
};

// Items by descending weight, each into the lightest pack that is not full; packs get equally many.
Packed balanced_packing(std::span<const float> weight, int n_packs) {
  const int n = static_cast<int>(weight.size()), capacity = n / n_packs;
  std::vector<int> order(n);
  std::iota(order.begin(), order.end(), 0);
  if (capacity == 1) return {order, std::vector<int>(n, 0)};
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return weight[a] > weight[b]; });
  Packed packed = {std::vector<int>(n), std::vector<int>(n)};
  std::vector<float> total(n_packs, 0);
  std::vector<int> used(n_packs, 0);
  for (const int item : order) {
    int lightest = -1;
    for (int p = 0; p < n_packs; ++p)
      if (used[p] < capacity && (lightest < 0 || total[p] < total[lightest])) lightest = p;
    packed.pack[item] = lightest;
    packed.place[item] = used[lightest]++;
    total[lightest] += weight[item];
  }
  return packed;
}

// Experts of one node and their replicas.
struct Replicated {
  std::vector<int> expert;  // [slots]
  std::vector<int> copies;  // [experts]
};

// Each further replica goes to the expert with the most load a replica.
Replicated replicate(std::span<const float> load, int n_slots) {
  const int n = static_cast<int>(load.size());
  Replicated r = {std::vector<int>(n), std::vector<int>(n, 1)};
  std::iota(r.expert.begin(), r.expert.end(), 0);
  std::vector<float> of_replica(load.begin(), load.end());
  while (std::ssize(r.expert) < n_slots) {
    const auto hottest = static_cast<int>(std::max_element(of_replica.begin(), of_replica.end()) -
                                          of_replica.begin());
    r.expert.push_back(hottest);
    of_replica[hottest] = load[hottest] / static_cast<float>(++r.copies[hottest]);
  }
  return r;
}

// The experts node by node: groups are packed by the load of their experts.
std::vector<int> experts_by_node(std::span<const float> load, const EplbShape& s) {
  const int n = static_cast<int>(load.size()), of_group = n / s.n_groups;
  std::vector<float> group_load(s.n_groups);
  for (int g = 0; g < s.n_groups; ++g)
    group_load[g] = static_cast<float>(
        std::accumulate(&load[g * of_group], &load[g * of_group] + of_group, 0.0));
  const Packed groups = balanced_packing(group_load, s.n_nodes);
  std::vector<int> experts(n);
  for (int e = 0; e < n; ++e) {
    const int g = e / of_group;
    const int place = groups.pack[g] * (s.n_groups / s.n_nodes) + groups.place[g];
    experts[place * of_group + e % of_group] = e;
  }
  return experts;
}

}  // namespace

bool takes(const EplbShape& s, int n_experts) {
  if (s.n_groups < 1 || s.n_nodes < 1 || s.n_gpus < 1) return false;
  if (s.n_slots % s.n_gpus != 0 || s.n_slots < n_experts) return false;
  const bool is_global = s.n_groups % s.n_nodes != 0;
  return is_global || (s.n_gpus % s.n_nodes == 0 && n_experts % s.n_groups == 0);
}

std::vector<int> eplb(std::span<const float> load, const EplbShape& shape) {
  const int n = static_cast<int>(load.size());
  check(takes(shape, n), "sizes that EPLB takes");
  EplbShape s = shape;
  if (s.n_groups % s.n_nodes != 0) s.n_groups = s.n_nodes = 1;
  const std::vector<int> experts = experts_by_node(load, s);
  const int of_node = n / s.n_nodes, slots_of_node = s.n_slots / s.n_nodes;
  const int slots_of_gpu = s.n_slots / s.n_gpus;
  std::vector<int> expert_of_slot(s.n_slots);
  for (int node = 0; node < s.n_nodes; ++node) {
    const int* const here = &experts[node * of_node];
    std::vector<float> node_load(of_node), slot_load;
    for (int i = 0; i < of_node; ++i) node_load[i] = load[here[i]];
    const Replicated r = replicate(node_load, slots_of_node);
    for (const int i : r.expert)
      slot_load.push_back(node_load[i] / static_cast<float>(r.copies[i]));
    const Packed gpus = balanced_packing(slot_load, s.n_gpus / s.n_nodes);
    for (int i = 0; i < slots_of_node; ++i)
      expert_of_slot[node * slots_of_node + gpus.pack[i] * slots_of_gpu + gpus.place[i]] =
          here[r.expert[i]];
  }
  return expert_of_slot;
}

}  // namespace tandem
