// A cluster's decoding step event by event: ranks that each have a part of the tokens and of the
// experts, tokens routed one by one, links that carry one message at a time. What predict.cpp
// expects on average is played here with its unevenness.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "offload/plan/predict.h"

namespace tandem {

struct SimulatedCluster {
  int n_ranks = 1, n_layers = 1;
  // The first of them have the backbone, and tokens; 0: all. If only some have it the others hold
  // the experts.
  int n_backbone_ranks = 0;
  int tokens_per_rank = 1;
  int n_experts = 1, top_k = 1;
  std::vector<std::vector<int>> owners;  // [experts] ranks; a token goes to the least loaded copy
  // Experts and n_redundant copies are dealt anew in each layer, by how often they are chosen there
  // (deal_experts); `owners` is not used.
  bool balanced = false;
  int n_redundant = 0;
  double skew = 0;  // expert e is chosen in proportion to 1 / (1 + e') ^ skew, e' its place in a
                    // random order of each layer
  uint64_t seed = 1;
  bool two_batches = false;  // the halves of a rank's tokens overlap

  // Kernel times. The backbone's: a part that does not depend on the tokens and one for each; a
  // used expert's: reading it, or its rows if they take longer; both where the one does not hide
  // the other, on CPUs.
  double backbone_seconds = 0, backbone_seconds_per_token = 0;
  double expert_seconds = 0, expert_seconds_per_row = 0;
  bool reading_hides = true;
  double link_bytes_per_second = 1e9, link_latency_seconds = 0;  // out
  std::vector<int> link_of = {};  // [ranks]; those of one link are one host. Empty: a link a rank
  double dispatch_bytes = 0, combine_bytes = 0;  // of one copy of a token
};

// When the last rank was done with each part of a layer (of its later half).
struct SimulatedLayer {
  double backbone_end = 0, dispatch_end = 0, experts_end = 0, combine_end = 0;
  double balance = 1;  // mean over largest of the ranks' time with experts
};

struct Simulation {
  std::vector<SimulatedLayer> layers;
  double seconds = 0;
  double compute_share = 0, link_share = 0;  // of the step that the mean rank or link is busy
};

// Throws Error for sizes that cannot be.
Simulation simulate(const SimulatedCluster& cluster);

// A placement's ranks with the kernel times that predict() has for them; experts as placed, routing
// skewed. Throws Error when the placement is not of replicas whose experts are spread over GPUs, or
// over the CPUs of several hosts.
SimulatedCluster cluster_of(const PlanInput& input, const Placement& placement, double skew);

std::string simulation_text(const Simulation& simulation);

}  // namespace tandem
