// Which rank each expert goes to: by how often it is used, within the room there is.
#pragma once
#include <vector>

namespace tandem {

constexpr int kUsualRedundancy = 32;  // copies of hot experts: DeepSeek-V3, 3.4

// Experts of one layer dealt to ranks so that loads are even (expert parallelism): owners[expert]
// are ranks. `n_redundant` second, third, .. copies go where a copy's load is highest; no rank gets
// the same expert twice or more than its even part of all copies, rounded up. n_redundant is at
// most experts x (ranks - 1).
std::vector<std::vector<int>> deal_experts(const std::vector<double>& shares, int n_ranks,
                                           int n_redundant);

}  // namespace tandem
