// A checkpoint ready to run. Everything is built here, in order, and lives as long as this object.
#pragma once
#include <memory>
#include <string>

#include "core/progress_watch.h"
#include "engine/host_pages.h"
#include "engine/step_runner.h"
#include "loader/decision.h"
#include "loader/expert_homes.h"
#include "loader/expert_workers.h"
#include "loader/grid_groups.h"
#include "loader/weights/rank_expert_mover.h"
#include "offload/cpu_experts.h"
#include "offload/ranks/exchanged_experts.h"
#include "offload/ranks/rank_experts.h"
#include "offload/ranks/replica_experts.h"
#include "offload/routing_recorder.h"
#include "ops/cpu_ops.h"
#include "scheduling/drafts/drafting.h"
#include "scheduling/sampler.h"
#include "text/tokenizer.h"

namespace tandem {

// Throws Error for options with which several ranks cannot compute a model.
void require_runs_on_ranks(const ModelOptions& options);

class LoadedModel {
 public:
  using Progress = LoadProgress;
  // Throws Error for invalid options or checkpoints, and for too little memory; ReportedElsewhere
  // if that happened on another rank.
  explicit LoadedModel(const ModelOptions& options, const Progress& progress = {});
  ~LoadedModel();
  LoadedModel(const LoadedModel&) = delete;
  LoadedModel& operator=(const LoadedModel&) = delete;

  StepRunner& model() { return *model_; }
  KvCache& cache() { return *cache_; }
  const ModelConfig& config() const { return config_; }
  // The first pipeline stage has layer 0.
  DType cache_type() const { return cache_->layer(0).dtype; }
  int64_t context() const { return context_; }
  const Drafting& drafting() const { return drafting_; }
  int n_threads() const { return topology_.n_cores(); }
  uint64_t identity() const { return identity_; }  // model_identity(); 0: it was not wanted
  const char* isa() const { return kernels_.name; }
  // What decides the bits of keys and answers, in a line: the devices, their kernels, where experts
  // are and in which format.
  const std::string& arithmetic() const { return arithmetic_; }
  // The name of the GPU that computes, "cpu", or both.
  std::string device() const {
    if (!gpu_) return are_of_two_kinds(on_gpu_) ? "cpu, other ranks on GPUs" : "cpu";
    const char* const also = worker_experts_ ? ", experts also on workers"
                             : experts_      ? ", experts also on the cpu"
                                             : "";
    return gpu_->gpu_name() + also + (are_of_two_kinds(on_gpu_) ? ", other ranks on the cpu" : "");
  }
  // What computes the dense products; empty unless the options ask for more than the kernels.
  const std::string& dense_products() const { return dense_products_; }
  const LoadReport& load_report() const { return report_; }
  const RoutingCounts* routing() const {  // null: not recorded
    if (gpu_) return gpu_->routing();
    return recorder_ ? &recorder_->counts() : nullptr;
  }
  const ExpertHomes& expert_homes() const { return expert_homes_; }
  const Timeline* timeline() const { return timeline_.get(); }  // null: not recorded
  int64_t packed_bytes() const { return static_cast<int64_t>(home_.bytes().size()); }

 private:
  // What is loaded: the options, the opened checkpoint and its weights.
  struct Source {
    const ModelOptions& options;
    OpenCheckpoint& checkpoint;
    const Progress& progress;
  };
  void load(const ModelOptions& options, const Progress& progress);
  void load_beside_moving_workers(ModelOptions options, const Progress& progress);
  void load_on_ranks(const ModelOptions& options, const Progress& progress);
  void choose_gpus(ModelOptions& options);
  Decision first_decision(const ModelOptions& options, ModelWeights& stored);
  Subject subject(const Ranks& ranks, ModelWeights& stored) const;
  void add_mtp(const ModelOptions& options, const WeightStore& store, ModelWeights& stored,
               Decision& decision);
  void load_on_gpu(const Source& source, const Decision& decision);
  void load_on_cpu(const Source& source, const Decision& decision);
  void make_alike(const ModelOptions& options, ModelWeights& stored, Decision& decision) const;
  std::string arithmetic_of(const Decision& decision) const;
  void start_mover(const Source& source, const Decision& decision,
                   std::unique_ptr<OutputThread> thread);
  void simulate_routing(const ModelOptions& options, const Decision& decision);
  void set_owners(const ModelOptions& options, const Decision& decision);
  ExpertPool& start_ranks(const ModelOptions& options, const Decision& decision);
  ExpertPool* start_workers(const ModelOptions& options, const Decision& decision);
  void start_replica(const ModelOptions& options, ExpertPool& mine);
  void watch_replica(const ModelOptions& options);
  std::unique_ptr<ExchangedExperts> exchanged_experts(const ModelOptions& options,
                                                      const Decision& decision, ExpertPool& mine);
  void join_ranks(const ModelOptions& options);
  void join_beside_cpus(const ModelOptions& options, const Decision& decision);
  int64_t kv_tokens_of_all(const ModelOptions& options, int64_t n_tokens) const;
  void add_host_pages(const ModelOptions& options);
  LoadReport load_host_weights(const Source& source, const ExpertsLayout& experts);
  void start_team(const ModelOptions& options, int max_tokens);

  ModelConfig config_;  // complete before anything refers to it
  uint64_t identity_ = 0;
  const cpu::KernelTable kernels_;
  const Topology topology_;  // the part that computes
  int64_t context_ = 0;
  Drafting drafting_;
  ExpertHomes expert_homes_;
  CpuWeights home_{kernels_, topology_};
  ModelWeights weights_;
  LoadReport report_;
  std::unique_ptr<Team> team_;                 // null: the GPU computes everything
  std::unique_ptr<ProgressWatch> watch_;       // for a team that a GPU waits for
  std::unique_ptr<CpuDevice> device_;          // null: the backbone is on the GPU
  std::unique_ptr<ProductProvider> provider_;  // beside the kernels; null: none
  std::unique_ptr<CpuOps> ops_;                // null: the backbone is on the GPU
  std::string dense_products_;
  std::string arithmetic_;
  std::unique_ptr<RoutingRecorder> recorder_;  // for a backbone on the CPU; null: none
  std::unique_ptr<CpuExperts> experts_;        // null: all experts are on the GPU
  std::unique_ptr<ExpertOwners> owners_;       // null without other ranks
  std::unique_ptr<ExpertMover> mover_;         // null: experts stay
  std::vector<int> host_of_rank_;              // of all ranks; empty: there are no others
  std::vector<bool> on_gpu_;                   // Subject::on_gpu
  GridGroups groups_;
  std::unique_ptr<RankExperts> rank_experts_;  // one of these two has experts_; null: neither
  std::unique_ptr<Group> delayed_;             // null: rows travel as fast as they can
  std::unique_ptr<ExchangedExperts> exchanged_experts_;
  std::optional<AskedWorkers> asked_workers_;        // nothing: there are no workers
  std::unique_ptr<WorkerExperts> worker_experts_;    // null: this process has no links to workers
  std::unique_ptr<Group> meetings_;                  // of replica_experts_
  std::unique_ptr<ReplicaExperts> replica_experts_;  // has worker_experts_; null: no replicas do
  std::unique_ptr<WorkerList> worker_list_;          // changes the workers of worker_experts_
  std::unique_ptr<Timeline> timeline_;
  std::unique_ptr<GpuModel> gpu_;                 // null: the CPU computes everything
  std::unique_ptr<ProgressWatch> rank_watch_;     // for GPUs of several ranks
  std::unique_ptr<ProgressWatch> replica_watch_;  // for steps of replica_experts_
  Heartbeat* heartbeat_ = nullptr;                // tells of replica_experts_; null: there is none
  std::unique_ptr<StepRunner> model_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<HostPages> host_pages_;  // for a cache on the GPU and several sequences
};

// The tokens that a model with model_vocab rows of logits may generate.
Vocabulary vocabulary_of(const Tokenizer& tokenizer, int model_vocab);

// The path of models/tiny-r1. Throws Error naming the places that were searched.
std::string embedded_model();

}  // namespace tandem
