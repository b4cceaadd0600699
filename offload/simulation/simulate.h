// Discrete-event simulation of a cluster's decode step: each rank has some of the tokens and of the
// experts, tokens are routed one by one, and a link transfers one message at a time. predict.cpp
// computes averages; the simulation shows the effect of imbalance.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "offload/plan/predict.h"

namespace tandem {

struct SimulatedCluster {
  int n_ranks = 1, n_layers = 1;
  // The first n_backbone_ranks ranks hold the backbone and the tokens; 0: all ranks. If only some
  // hold it, the others hold the experts.
  int n_backbone_ranks = 0;
  int tokens_per_rank = 1;
  int n_experts = 1, top_k = 1;
  // [experts] ranks. A token goes to the least loaded replica.
  std::vector<std::vector<int>> owners;
  // true: each layer assigns experts and n_redundant replicas by that layer's popularity
  // (assign_experts); `owners` is not used.
  bool balanced = false;
  int n_redundant = 0;
  double skew = 0;  // expert e is chosen in proportion to 1 / (1 + e') ^ skew, where e' is its rank
                    // in a random order per layer
  uint64_t seed = 1;
  bool two_batches = false;  // two micro-batches of each rank's tokens overlap

  // Kernel times. Backbone: a constant plus a time per token. Each used expert: the longer of
  // reading it and computing its rows, or their sum where reading_hides is false (CPUs).
  double backbone_seconds = 0, backbone_seconds_per_token = 0;
  double expert_seconds = 0, expert_seconds_per_row = 0;
  bool reading_hides = true;
  double link_bytes_per_second = 1e9, link_latency_seconds = 0;  // outgoing
  // [ranks] Ranks with the same link are on one host. Empty: one link per rank.
  std::vector<int> link_of = {};
  double dispatch_bytes = 0, combine_bytes = 0;  // of a token's row to one rank, and of its sum
  // [ranks] A token's row and sum cross once to each other host; those between ranks of one host
  // travel over a link of their own at near_bytes_per_second, 0: they arrive at once. Empty: a row
  // is sent once to each rank.
  std::vector<int> host_of = {};
  double near_bytes_per_second = 0;
  // A token's row crosses to each other host also where it has none of its experts, to the rank
  // there with its rank's number, as in decode steps of GPUs. Hosts have as many ranks each.
  bool to_all_hosts = false;
};

// Times at which the last rank finished each part of a layer (of its last micro-batch).
struct SimulatedLayer {
  double backbone_end = 0, dispatch_end = 0, experts_end = 0, combine_end = 0;
  double balance = 1;  // mean over maximum of the ranks' expert time
};

struct Simulation {
  std::vector<SimulatedLayer> layers;
  double seconds = 0;
  double compute_share = 0, link_share = 0;  // mean busy fraction of ranks and of links
};

// Throws Error for sizes out of range.
Simulation simulate(const SimulatedCluster& cluster);

// The ranks of a placement with the kernel times of predict(); experts as placed, routing skewed.
// Throws Error unless the placement has replicas whose experts are spread over GPUs, or over the
// CPUs of several hosts.
SimulatedCluster cluster_of(const PlanInput& input, const Placement& placement, double skew);

std::string simulation_text(const Simulation& simulation);

}  // namespace tandem
