// DeepSeek's expert-parallel load balancer (github.com/deepseek-ai/EPLB, eplb.py): which replicas
// of a layer's experts there are and which GPU has each, from the load of every expert. Bit for
// bit, ties included.
#pragma once
#include <span>
#include <vector>

namespace tandem {

struct EplbShape {
  int n_slots;   // replicas of all experts; a multiple of n_gpus, at least one for each expert
  int n_groups;  // of the router; adjacent experts form one
  int n_nodes;
  int n_gpus;  // a multiple of n_nodes, unless the groups do not divide among nodes
};

// Whether eplb() takes these sizes.
bool takes(const EplbShape& shape, int n_experts);

// The expert in each of n_slots slots; GPU g has the slots from g * n_slots / n_gpus on, and may
// have an expert twice. load: [experts]. Where groups divide evenly among nodes, a group stays on
// one node (hierarchical); otherwise every expert may be on any GPU (global).
std::vector<int> eplb(std::span<const float> load, const EplbShape& shape);

}  // namespace tandem
