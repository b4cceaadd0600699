// Which device each expert goes to: by how often it is used, within the room there is.
#pragma once
#include <cstdint>
#include <vector>

#include "offload/plan/placement.h"
#include "offload/plan/workload.h"

namespace tandem {

struct ExpertSeat {
  double seconds_per_use;
  int64_t slots;  // experts it can hold, of all layers together
};

// shares[layer][expert] -> seat of each. Seats work at the same time, so a layer takes as long as
// its busiest seat, and the sum over layers is made small: exactly least up to kExactExperts
// experts in all; beyond, the hottest experts leave the first seat one by one, which is least as
// long as the first seat is the slowest and stays the busiest. Seat 0 has room for all.
std::vector<std::vector<int>> assign_experts(const std::vector<std::vector<double>>& shares,
                                             const std::vector<ExpertSeat>& seats);
constexpr int kExactExperts = 14;

// The quantity made small.
double assigned_seconds(const std::vector<std::vector<double>>& shares,
                        const std::vector<ExpertSeat>& seats,
                        const std::vector<std::vector<int>>& owners);

// Experts of one layer dealt to ranks so that loads are even (expert parallelism): owners[expert]
// are ranks. `n_redundant` second, third, .. copies go where a copy's load is highest; no rank gets
// the same expert twice or more than its even part of all copies, rounded up. n_redundant is at
// most experts x (ranks - 1).
std::vector<std::vector<int>> deal_experts(const std::vector<double>& shares, int n_ranks,
                                           int n_redundant);

}  // namespace tandem
