// Read bandwidth of the cores of one NUMA node, from its own memory and from another node's.
#pragma once
#include <vector>

#include "core/machine.h"
#include "core/topology.h"
#include "cpu_kernels/peaks.h"

namespace tandem {

struct NumaSpeed {
  std::vector<NumaNode> nodes;        // each measured while the others are idle
  double cross_bytes_per_second = 0;  // the slowest measured pair; 0 for one node
  bool bound = true;                  // memory could be bound to the nodes
};

// Each node's memory, at most `bytes`, is read for `seconds` by its own cores, and then by those of
// node (i + n / 2) mod n.
NumaSpeed numa_speed(const Topology& topology, const cpu::ReadLoop& loop, int64_t bytes,
                     double seconds);

}  // namespace tandem
