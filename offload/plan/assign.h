// Assignment of experts to ranks, balanced by how often each expert is used, within each rank's
// slots.
#pragma once
#include <vector>

namespace tandem {

constexpr int kUsualRedundancy = 32;  // replicas of hot experts: DeepSeek-V3, 3.4

// Assigns the experts of one layer to ranks so that loads are even (expert parallelism):
// owners[expert] lists ranks. `n_redundant` replicas go to the experts whose load per replica is
// highest. No rank gets an expert twice, or more than its even part of all replicas, rounded up.
// n_redundant is at most experts x (ranks - 1).
std::vector<std::vector<int>> assign_experts(const std::vector<double>& shares, int n_ranks,
                                             int n_redundant);

}  // namespace tandem
