// Expert workers of a model that is being loaded: what they have, and the pool that uses them.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "engine/expert_mover.h"
#include "io/weight_store.h"
#include "loader/model_options.h"
#include "offload/workers/worker_experts.h"
#include "offload/workers/worker_list.h"

namespace tandem {

struct AskedWorkers {
  std::unique_ptr<Transport> transport;
  std::vector<std::unique_ptr<WorkerLink>> links;
  std::vector<WorkerWelcome> welcomes;  // [workers]
  ExpertsOfLayers experts;  // [layers, also unused ones that draft][n_experts] that any worker has
  std::unique_ptr<WorkerList> list;  // watch_workers() takes it

  // Subject::on_workers
  std::vector<std::vector<bool>> experts_of_layers(const ModelConfig& config) const;
  // Why n_layers cannot be used, the last of which are for multi-token prediction; empty if all
  // workers have their experts of them.
  std::string why_no_mtp(int n_layers) const;
};

// Asks each worker what it has, for at most the patience of the options. Throws Error for addresses
// that are malformed or occur twice, a worker with another model or another secret, workers that
// have the same expert and would compute different bits, and one without its experts of the MTP
// layers that the config uses; RunError for one that does not answer, unless another address of its
// name does. The threads of the links and of the list begin here, before those that compute.
AskedWorkers ask_workers(const ModelOptions& options, const WeightStore& store,
                         const ModelConfig& config);

// Whether all ranks are replicas of the backbone that have links of their own. Of ranks that divide
// one backbone only the first has links.
bool every_rank_has_links(const ModelOptions& options);

// Throws Error, which says what to leave out, unless ranks with these options can use workers.
void require_workers_of_ranks(const ModelOptions& options);

// The same as ask_workers() on ranks: those that have links ask, and the others are told which
// experts workers have. All ranks call it. Throws AgreedError, also where replicas have found
// different workers.
AskedWorkers ask_workers_of_ranks(Group& group, const ModelOptions& options,
                                  const WeightStore& store, const ModelConfig& config);

struct WorkerExpertsOf {
  const ModelOptions& options;
  const cpu::KernelTable& kernels;
  const ModelConfig& config;
  CpuExperts& local;
  Team& team;
  int max_tokens;     // of a step
  int micro_batches;  // WorkerExpertsParts::micro_batches
};
// Connects to the workers. Throws Error if a step may have more tokens than a worker takes rows.
std::unique_ptr<WorkerExperts> worker_experts(const WorkerExpertsOf& of, AskedWorkers& asked);

// What moves experts between the workers of the pool, which outlives it. Notes which workers keep
// theirs. on_gpu: of this process, as keep_on_gpu() takes it. Throws Error if fewer than two let
// theirs move.
std::unique_ptr<ExpertMover> worker_mover(const ModelOptions& options, WorkerExperts& pool,
                                          std::vector<std::vector<bool>> on_gpu);

// The pool follows the list of its workers until the returned object, which is destroyed before the
// pool, ends.
std::unique_ptr<WorkerList> watch_workers(AskedWorkers& asked, WorkerExperts& pool);

}  // namespace tandem
