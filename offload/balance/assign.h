// Assignment of experts to ranks, balanced by how often each expert is used, within each rank's
// slots.
#pragma once
#include <vector>

namespace tandem {

constexpr int kUsualRedundancy = 32;  // replicas of hot experts: DeepSeek-V3, 3.4

// The ranks that have each expert of a layer, ascending: [experts]. Several ranks have replicas.
using OwnersOfLayer = std::vector<std::vector<int>>;

// Assigns the experts of one layer to ranks so that loads are even (expert parallelism).
// `n_redundant` replicas go to the experts whose load per replica is highest, replicas go to the
// least loaded rank, and they are swapped in pairs, or moved to free slots, while that lowers the
// largest load. No rank gets an expert twice, or more than its even part of all replicas, rounded
// up. n_redundant is at most experts x (ranks - 1).
OwnersOfLayer assign_experts(const std::vector<double>& shares, int n_ranks, int n_redundant);
// The same for ranks with this many slots, [ranks], of which there are at least as many as experts
// and replicas.
OwnersOfLayer assign_experts(const std::vector<double>& shares, const std::vector<int>& slots,
                             int n_redundant);

// The same for ranks that compute at different speeds, [ranks], so that they end together: the
// experts with most load first, each on the ranks that would then have worked least, for which
// `slots` [ranks] have room. An expert gets fewer replicas where no other rank has a free slot.
OwnersOfLayer assign_by_speed(const std::vector<double>& shares, const std::vector<double>& speeds,
                              std::vector<int> slots, int n_redundant);

// `total` things that are alike, divided so that all end together: each goes to the one that would
// have ended first with it, of those that have fewer than most[i]. Fewer if there is no room.
std::vector<int> counts_by_speed(const std::vector<double>& speeds, const std::vector<int>& most,
                                 int total);

// Swaps replicas between ranks, or moves them to free slots, as long as that lowers the largest
// load. slots: [ranks] the most experts that each may have. Every expert keeps its number of
// replicas.
void level_loads(OwnersOfLayer& owners, const std::vector<double>& shares,
                 const std::vector<int>& slots);

// The mean load of the ranks over the largest; replicas share an expert's load. 1 without load.
double balancedness(const OwnersOfLayer& owners, const std::vector<double>& shares, int n_ranks);

// Ranks in the order of their nodes, and the router's groups of adjacent experts.
struct RankLayout {
  int n_ranks;
  int n_nodes = 1;
  int n_groups = 1;
};

// EPLB's assignment (eplb.h) or that of assign_experts(), whichever is more even. Where EPLB gives
// a rank an expert twice, other experts get replicas there instead.
struct BalancedOwners {
  OwnersOfLayer owners;
  bool by_eplb = false;
  double own = 1;   // balancedness of assign_experts()
  double eplb = 0;  // and of EPLB; 0 where its sizes do not divide
};
BalancedOwners assign_balanced(const std::vector<double>& shares, const RankLayout& layout,
                               int n_redundant);

}  // namespace tandem
