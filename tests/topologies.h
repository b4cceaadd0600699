// Topologies for tests, whose cores need not exist.
#pragma once
#include <initializer_list>

#include "core/topology.h"

namespace tandem::test {

// Nodes with the given numbers of cores. Threads are not pinned and memory is not bound.
inline Topology topology_of(std::initializer_list<int> cores) {
  Topology topology{.nodes = {}, .notes = {}, .system = {}};
  int cpu = 0;
  for (const int n : cores) {
    TopologyNode node{.index = topology.n_nodes(), .cpus = {}};
    for (int i = 0; i < n; ++i) node.cpus.push_back(cpu++);
    topology.nodes.push_back(node);
  }
  return topology;
}

}  // namespace tandem::test
