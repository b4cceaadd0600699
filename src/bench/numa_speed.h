// How fast the cores of one NUMA node read its own memory and another node's.
#pragma once
#include <vector>

#include "core/machine.h"
#include "core/topology.h"
#include "cpu_kernels/peaks.h"

namespace tandem {

struct NumaSpeed {
  std::vector<NumaNode> nodes;        // each measured while the others rest
  double cross_bytes_per_second = 0;  // the slowest pair of two nodes; one node: 0
  bool bound = true;                  // memory was where it should be
};

// Takes `seconds` for each node and pair of neighbours. Memory is at most `bytes` a node.
NumaSpeed numa_speed(const Topology& topology, const cpu::ReadLoop& loop, int64_t bytes,
                     double seconds);

}  // namespace tandem
