// Where everything of a model is kept and how its steps are formed: from the file of --placement,
// or else by what fits (offload/parts/fit.h). What is left to the loader is only what depends on
// the memory that is free after loading: pages of host memory and, on a CPU, the tokens of KV
// cache.
#pragma once
#include <limits>

#include "core/topology.h"
#include "loader/gpu_model.h"
#include "loader/model_options.h"
#include "offload/parts/executed_parts.h"
#include "offload/ranks/expert_exchange.h"

namespace tandem {

struct Decision {
  int64_t context;    // tokens per sequence
  StepLimits limits;  // of one step
  ExecutedParts parts;
  // What of the backbone this rank has. Nothing if it has all of it and no rank computes experts
  // for another.
  std::optional<BackboneShare> share = {};
  ExpertRows rows = ExpertRows::kExact;  // as they travel between ranks
  bool beside_cpus = false;              // some ranks compute on GPUs and others on CPUs
  bool first_routes = false;             // RankGroups, in this rank's replica
  StageLayers stage() const { return share ? share->layers : kAllLayers; }
};

// The model and the part of this machine that computes.
struct Subject {
  const ModelConfig& config;
  ModelWeights& stored;  // stored_weights()
  const Topology& topology;
  const cpu::KernelTable& kernels;
  const CpuWeights& home;
  int64_t memory_bytes;  // of the host
  PlacedRank rank = {};
  // [n_all_layers][n_experts], empty for a dense layer: true for experts that workers have. Empty:
  // there are no workers.
  std::vector<std::vector<bool>> on_workers = {};
  std::vector<int> host_of_rank = {};  // of all ranks; empty: they are on one host
  std::vector<bool> on_gpu = {};       // [ranks] whether each computes on a GPU; empty: all alike
  // Experts, of all layers, that the GPU has at most: as many on all replicas with workers.
  int64_t most_on_gpu = std::numeric_limits<int64_t>::max();
};

// Throws Error for options that contradict each other or the placement, for a placement that is
// malformed, does not suit the model or this machine, or has parts that this program does not run,
// and for too little memory. DeviceChoice::kAuto chooses the CPU with a warning where no GPU takes
// the model, unless a placement names the GPU.
Decision decide(const ModelOptions& options, const Subject& subject);

// Decides for a model with its MTP layers, like `without` for the same model without them. Returns
// nothing if the layers would displace something: another device, the experts' formats, or the last
// 15 % of the host's memory, which the cache of files needs.
std::optional<Decision> decide_with_mtp(const ModelOptions& options, const Subject& subject,
                                        const Decision& without);

// How rows go to other ranks; nothing: they do not, or as is measured to be fastest.
std::optional<ExchangeMode> exchange_mode(ExpertDispatch dispatch);
// Whether CPU ranks of the grid exchange rows (ExchangedExperts); else they add up their sums.
bool exchanges_rows(const ModelOptions& options, BackboneGrid grid);
// Why ranks of two kinds do not run with these options, in one line; empty: they do.
std::string why_not_of_two_kinds(const ModelOptions& options);
// The hosts of the ranks of this rank's stage; host_of_rank as in Subject.
HostLayout hosts_of_stage(const std::vector<int>& host_of_rank, BackboneGrid grid, int rank);
// ExchangedParts::micro_batches, and WorkerExpertsParts::micro_batches: as asked, or as placed
int exchanged_micro_batches(const ModelOptions& options, const ExecutedParts& parts);

// What the GPU is loaded with; hosts: hosts_of_stage().
GpuModelOptions gpu_options(const ModelOptions& options, const Decision& decision,
                            const HostLayout& hosts);

}  // namespace tandem
