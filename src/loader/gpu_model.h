// A checkpoint ready to run with its backbone on a GPU. Implemented in src/with_gpu;
// src/without_gpu replaces it in builds without CUDA, at link time.
#pragma once
#include <memory>
#include <string>

#include "comm/group.h"
#include "comm/host_groups.h"
#include "core/progress_watch.h"
#include "engine/expert_mover.h"
#include "engine/step_runner.h"
#include "io/load_jobs.h"
#include "io/weight_store.h"
#include "loader/weights/load_weights.h"
#include "loader/weights/spare_experts.h"
#include "offload/cpu_experts.h"
#include "offload/parts/fit.h"
#include "offload/plan/workload.h"
#include "offload/ranks/expert_exchange.h"
#include "offload/timeline.h"
#include "ops/rank_calls.h"
#include "scheduling/output_thread.h"

namespace tandem {

struct GpuModelOptions {
  int max_tokens = 1;                       // per step
  int max_logits = 1;                       // per step
  int64_t context = 0;                      // tokens per sequence
  DType cache_type = DType::kBF16;          // or kF8E4M3
  bool fp8_activations = false;             // in products of many tokens with FP8 weights
  std::optional<BackboneShare> share = {};  // of this rank; nothing: the whole backbone
  BackboneGrid grid = {};                   // of all ranks
  // Some ranks have no GPU: what ranks do together passes through host memory.
  bool beside_cpus = false;
  // There, rows go to the ranks that have their experts: all that this GPU has not are theirs.
  bool exchanges_on_host = false;
  int n_threads = 1;                // loading threads
  bool replicated_experts = false;  // several ranks have the same expert
  bool moves_experts = false;       // mover()
  int micro_batches = 1;            // of steps of replicas, or ExpertPool::kMeasured
  // How rows of replicas travel; nothing: what is faster.
  std::optional<ExchangeMode> exchange = {};
  ExpertRows rows = ExpertRows::kExact;        // how they travel
  HostLayout hosts = HostLayout::one_host(1);  // of the ranks of the stage
  bool records = true;                         // decode steps are recorded as graphs
  LoadProgress progress = {};
  // How long the CPU waits for the GPU, which waits for other ranks.
  std::chrono::duration<double> patience = std::chrono::seconds(60);
  // Tokens for which experts are computed at a time: replicas bring theirs together.
  int expert_tokens() const {
    return grid.n_replicas > 1 && !beside_cpus ? served_tokens() : max_tokens;
  }
  // Tokens of a step that all ranks of a stage send to the experts of one.
  int served_tokens() const { return grid.of_stage().most_tokens(max_tokens); }
};

// What moves experts between the GPU and the CPU beside it, or between the GPUs of ranks.
struct GpuMoverParts {
  std::shared_ptr<OpenCheckpoint> checkpoint;
  std::unique_ptr<OutputThread> thread;       // for LoadingMover
  int n_threads;                              // that read
  StageLayers layers = kAllLayers;            // of this rank's stage
  std::unique_ptr<SpareExperts> on_cpu = {};  // null: there are other ranks
  ModelWeights* cpu_weights = nullptr;        // of on_cpu
  ExpertOwners* owners = nullptr;             // null: there are no other ranks
  int rank = 0;                               // of this rank in its stage
};
// Experts for which a GPU has spare memory if they move.
int spare_experts(const GpuParts& parts);

// Owns everything that computes on the GPU.
class GpuModel {
 public:
  virtual ~GpuModel() = default;
  virtual const std::string& gpu_name() const = 0;  // name of the GPU
  // What decides the bits of what it computes, in a line.
  virtual std::string arithmetic() const = 0;
  virtual const ModelWeights& weights() const = 0;
  virtual const LoadReport& report() const = 0;
  virtual Device& device() = 0;
  virtual Ops& ops() = 0;
  // The experts on the GPU and, once added, those of the CPU or of workers. May have none.
  virtual ExpertPool& experts() = 0;
  // `experts` are what this host has. `others`, if any, uses them and other processes, workers or
  // ranks, for all experts that the GPU does not have. All must outlive the object; the timeline
  // may be null.
  virtual void add_cpu_experts(CpuExperts& experts, ExpertPool* others, Timeline* timeline) = 0;
  // Where rows are exchanged on the host: what computes those that arrive here, in `cpu` and,
  // beside the backbone, on the GPU. Their sums do not wait for those of this rank's own rows.
  virtual ExpertPool& served_experts(CpuExperts& cpu) = 0;
  // The GPUs of the group's ranks compute together, each a rank's share of a replica. All ranks
  // call it, after add_cpu_experts(). The owners outlive the object. Throws Error where the GPUs
  // cannot be connected.
  // on_hang is called, from another thread, where GPUs wait for each other without end while they
  // measure how rows travel.
  virtual void join(Group& ranks, const ExpertOwners& owners,
                    const std::function<void()>& on_hang) = 0;
  // The same beside ranks without GPUs: groups that outlive the object.
  virtual void use(const RankGroups& ranks) = 0;
  // After join(): how rows of replicas travel, in a line; empty: there is one replica.
  virtual std::string ways_of_rows() const = 0;
  // For options that move experts; the last call before the first step. What the parts refer to
  // outlives the mover.
  virtual std::unique_ptr<ExpertMover> mover(GpuMoverParts parts) = 0;
  // Whether the GPU has work of several ranks, and how far it is. For any thread.
  virtual WorkProgress progress() const = 0;
  // Starts counting in experts() which experts are chosen. Call it last.
  virtual void record_routing() = 0;
  virtual const RoutingCounts* routing() const = 0;  // null: not recorded
};

// A process among the ranks of a host uses the index-th GPU, or its only one. Called before what
// follows.
void choose_gpu(int index);
// Why no model can run on a GPU here, in one line; empty if one can.
std::string why_no_gpu();
// What tells the GPU that would be used from others, also from those that other processes use.
// Throws Error when there is none, as this_gpu() does.
std::string id_of_gpu();
// The GPU that would be used.
Gpu this_gpu();

// Throws Error if the GPU that would be used cannot multiply FP8 by FP8, for --activations fp8.
void require_fp8_gpu();

// Memory of the GPU that would be used, and what a model takes of it, for fit(). `stored`:
// stored_weights(); it and `config` must outlive the result. Throws Error when the kernels do not
// support the model or the options. Loads nothing.
GpuMemory gpu_memory(ModelWeights& stored, const ModelConfig& config,
                     const GpuModelOptions& options);

// Throws Error if this GPU cannot share a step with the CPU and `parts` asks for that. Returns what
// makes sharing slower on this GPU, in one line; empty: nothing.
std::string require_hand_off(const GpuParts& parts);

// `config` must outlive the model. Throws Error when no GPU can be used.
std::unique_ptr<GpuModel> load_gpu_model(const WeightStore& store, ModelWeights& stored,
                                         const ModelConfig& config, const GpuModelOptions& options,
                                         const GpuParts& parts);

}  // namespace tandem
