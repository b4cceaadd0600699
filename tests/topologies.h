// Machines for tests, with cores that need not exist.
#pragma once
#include <initializer_list>

#include "core/topology.h"

namespace tandem::test {

// Nodes with so many cores each, threads of which run anywhere and whose memory is this machine's.
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
