// Experts that move between workers: who has which, as plans see it, and what a wave of changes
// brings to each worker and takes from it. Pure.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "scheduling/expert_loads.h"
#include "transport/expert_messages.h"

namespace tandem {

// The workers of a backbone as they are at a time. Number 0 of `homes` is the backbone, which has
// what no worker has; workers follow in this order.
struct WorkerHomes {
  struct Worker {
    std::string address;
    WorkerWelcome welcome;
    bool moves;  // its experts may move now
  };
  std::vector<Worker> workers;
  ExpertHomes homes;
};
// The owners of the experts of n_layers layers. Experts move between workers that would compute the
// same sums as the first one whose experts may move; all other workers are fixed.
WorkerHomes worker_homes(std::vector<WorkerHomes::Worker> workers, int n_layers);
// The backbone computes on its GPU these experts, on_gpu[layer][expert], also where workers have
// them: no worker is asked for them, so they are number 0's and stay.
void keep_on_gpu(const std::vector<std::vector<bool>>& on_gpu, ExpertHomes& homes);

struct WorkerMove {
  struct Part {
    std::string address;
    ExpertsOfLayers arriving, leaving;
    std::string why_not = {};  // it was not asked; empty: it was
  };
  std::vector<Part> parts;  // of the workers that the changes concern
};
// The ranks of the changes are numbers of `homes`.
WorkerMove worker_move(const WorkerHomes& homes, std::span<const ExpertChange> changes);

struct WorkerMoveState {
  bool is_loading = false;
  int64_t n_bytes = 0;  // that workers have read, once they have loaded all
  std::string why;      // the move cannot be made; empty: it can, once nothing is loaded
};

}  // namespace tandem
