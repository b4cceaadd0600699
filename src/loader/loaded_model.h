// A checkpoint ready to run. Everything is built here, in order, and lives as long as this object.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "core/team_watch.h"
#include "engine/host_pages.h"
#include "engine/step_runner.h"
#include "loader/gpu_model.h"
#include "loader/load_weights.h"
#include "loader/placement_file.h"
#include "offload/cpu_experts.h"
#include "offload/routing_recorder.h"
#include "ops/cpu_ops.h"

namespace tandem {

constexpr int64_t kDefaultContext = 8192;
constexpr int kStepTokens = 512;  // tokens of a prompt per step

struct ModelOptions {
  std::string directory;
  std::string device = "cpu";  // auto, cpu or cuda
  std::string isa = "auto";    // auto, or a name of cpu::Isa
  int n_threads = 0;           // 0: one per core
  int64_t context = 0;         // tokens per sequence; 0: the model's own, at most kDefaultContext
  // Tokens of KV cache for all sequences: at least one context, and more as this fraction of the
  // free memory after loading allows, up to max_kv_tokens. With a GPU this is GPU memory; pages in
  // host memory hold the rest (host_pages_for()).
  double kv_fraction = 0;
  int64_t max_kv_tokens = 0;
  int step_tokens = kStepTokens;  // maximum tokens per step
  int max_logits = 1;             // rows of logits per step
  AttentionForm attention = AttentionForm::kAuto;
  std::string kv = "auto";           // KV cache type: auto, bf16 or, on a GPU, fp8
  std::string activations = "bf16";  // GPU products of many tokens: bf16 or fp8
  // Format of the routed experts: auto (as stored, or the first of int8 and int4 that fits the
  // memory) or a name of weight_format().
  std::string experts = "auto";
  std::string placement = {};  // file that sets experts, context and steps instead
  std::string cache = {};      // folder of the packed cache; empty: default_cache_directory()
  CacheUse cache_use = CacheUse::kRead;
  bool record_routing = false;
  bool record_timeline = false;      // of steps shared by GPU and CPU
  LoadProgress write_progress = {};  // of the packed cache
  std::function<void(const std::string&)> warn = [](const std::string&) {};  // called with one line
};

class LoadedModel {
 public:
  using Progress = LoadProgress;
  // Throws Error for invalid options or checkpoints, and for too little memory.
  explicit LoadedModel(const ModelOptions& options, const Progress& progress = {});

  StepRunner& model() { return *model_; }
  KvCache& cache() { return *cache_; }
  HostPages* host_pages() { return host_pages_.get(); }  // null: none
  const ModelConfig& config() const { return config_; }
  DType cache_type() const { return cache_->layer(0).dtype; }
  int64_t context() const { return context_; }
  int n_threads() const { return topology_.n_cores(); }
  const char* isa() const { return kernels_.name; }
  // The name of the GPU that computes, "cpu", or both.
  std::string device() const {
    if (!gpu_) return "cpu";
    return experts_ ? gpu_->gpu_name() + ", experts also on the cpu" : gpu_->gpu_name();
  }
  const LoadReport& load_report() const { return report_; }
  const RoutingCounts* routing() const {  // null: not recorded
    if (gpu_) return gpu_->routing();
    return recorder_ ? &recorder_->counts() : nullptr;
  }
  const Timeline* timeline() const { return timeline_.get(); }  // null: not recorded
  int64_t packed_bytes() const { return static_cast<int64_t>(home_.bytes().size()); }

 private:
  bool load_on_gpu(const ModelOptions& options, const Progress& progress);
  std::optional<GpuShare> gpu_share(const ModelOptions& options, ModelWeights& stored,
                                    const GpuModelOptions& gpu) const;
  void load_on_cpu(const ModelOptions& options, const Progress& progress);
  void add_host_pages(const ModelOptions& options);
  int step_tokens(const ModelOptions& options, int64_t most) const;
  LoadReport load_host_weights(const ModelOptions& options, const WeightStore& store,
                               ModelWeights& stored, const ExpertsLayout& experts,
                               const Progress& progress);
  void start_team(const ModelOptions& options, int max_tokens);

  const ModelConfig config_;
  const cpu::KernelTable kernels_;
  const Topology topology_;                    // the part that computes
  bool on_gpu_;                                // true: the backbone is on the GPU
  const std::optional<ExecutedParts> placed_;  // from --placement
  const int64_t context_;
  CpuWeights home_{kernels_, topology_};
  ModelWeights weights_;
  LoadReport report_;
  std::unique_ptr<Team> team_;                 // null: the GPU computes everything
  std::unique_ptr<TeamWatch> watch_;           // for a team that a GPU waits for
  std::unique_ptr<CpuDevice> device_;          // null: the backbone is on the GPU
  std::unique_ptr<CpuOps> ops_;                // the same
  std::unique_ptr<RoutingRecorder> recorder_;  // of a backbone on the CPU; null: none
  std::unique_ptr<CpuExperts> experts_;        // null: all experts are on the GPU
  std::unique_ptr<Timeline> timeline_;
  std::unique_ptr<GpuModel> gpu_;  // null: the CPU computes everything
  std::unique_ptr<StepRunner> model_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<HostPages> host_pages_;  // for a cache on the GPU and several sequences
};

// The type of a GPU's cache according to --kv; empty: auto. Throws Error for names other than auto,
// bf16 and fp8.
std::optional<DType> wanted_cache_type(const std::string& option);

// True if --activations is fp8. Throws Error for names other than fp8 and bf16.
bool fp8_activations(const std::string& option);

// The instruction set of --isa or the environment variable TANDEM_ISA. Throws Error for an unknown
// one, and for one that this machine lacks, naming the available ones.
cpu::Isa choose_isa(const std::string& option);

// The path of models/tiny-r1. Throws Error naming the places that were searched.
std::string embedded_model();

}  // namespace tandem
