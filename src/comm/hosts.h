// The hosts of ranks, which ranks share a host's cores, and how far the clocks of hosts differ.
#pragma once
#include <functional>
#include <vector>

#include "comm/group.h"

namespace tandem {

// The host of each rank, numbered from 0 in the order of ranks. Containers of one machine are one
// host. All ranks call it.
std::vector<int> hosts_of_ranks(Group& group);
// The same for simulated hosts with so many ranks each, one host after another. Throws Error where
// those are not n_ranks.
std::vector<int> simulated_hosts_of_ranks(const std::vector<int>& n_of_host, int n_ranks);

// A rank among those of its host, and among those of them that may use the same cores: srun, and
// mpirun where it binds, give each rank cores of its own.
struct PlaceOnHost {
  int of_host = 0, n_of_host = 1;
  int of_cores = 0, n_of_cores = 1;
  bool operator==(const PlaceOnHost&) const = default;
};
// host_of_rank: [ranks]; cores_of_rank: [ranks], equal numbers for equal sets of cores.
PlaceOnHost place_on_host(const std::vector<int>& host_of_rank,
                          const std::vector<int>& cores_of_rank, int rank);
// The place of this rank; all ranks call it. The launcher is not asked, because srun tells no rank
// how many ranks its host has.
PlaceOnHost place_on_host(Group& group);

struct ClockDifference {
  double seconds = 0;  // is added to a time of the rank's steady clock to get that of rank 0
  double within = 0;   // by which `seconds` may be wrong
};
// [ranks]; all ranks call it and get the same. Ranks of one host have one steady clock. Another
// host tells its time to rank 0 in answer to a message: it lies between the two times that rank 0
// reads before and after, and the shortest of several rounds counts. now: this rank's clock.
std::vector<ClockDifference> clock_differences(Group& group, const std::vector<int>& host_of_rank,
                                               const std::function<double()>& now);

}  // namespace tandem
