// A slow network, for tests and benchmarks: what a rank sends to another host arrives some time
// later, which no rank spends computing.
#pragma once
#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "comm/group.h"

namespace tandem {

struct SimulatedNetwork {
  std::chrono::duration<double> delay{0};
  double bytes_per_second = 0;  // that a rank sends to other hosts, or gets from them; 0: no limit
  // [ranks]; empty: each is on a host of its own, but they share memory.
  std::vector<int> host_of_rank = {};
  // If not null, the bytes that this rank sends to other hosts by calls, not through windows, are
  // added to it.
  std::atomic<int64_t>* bytes_sent = nullptr;
};

// The calls of `group`, whose ranks have the same steady clock: processes of one host, or threads.
// A call returns no earlier than `delay` after each rank of another host began it, and as much
// later as the bytes between hosts take; a number of a window is seen `delay` after it was told.
// Ranks of several hosts that are named share no window. All ranks call it, and throw Error where
// they are on several hosts; the group outlives what is returned.
std::unique_ptr<Group> make_delayed(Group& group, const SimulatedNetwork& network);

}  // namespace tandem
