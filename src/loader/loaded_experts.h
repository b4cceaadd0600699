// The part of a checkpoint that an expert worker needs: its routed experts, and what computes them.
#pragma once
#include <memory>
#include <string>
#include <string_view>

#include "core/machine_info.h"
#include "core/progress_watch.h"
#include "loader/gpu_experts.h"
#include "loader/model_options.h"
#include "loader/weights/load_weights.h"
#include "loader/weights/moving_experts.h"
#include "loader/weights/spare_experts.h"
#include "loader/weights/standby_experts.h"
#include "offload/cpu_experts.h"
#include "offload/workers/expert_server.h"

namespace tandem {

// Instead of experts: none at first, and those that backbones ask for once their workers are lost.
constexpr std::string_view kStandby = "standby";

struct LoadedExpertsOptions {
  std::string directory;
  std::string experts = "auto";  // experts_from_text(), or kStandby
  // Which devices compute: the CPU, or a GPU for as many experts as fit it and the CPU for the
  // others. kAuto: a GPU where one takes experts. Standbys compute on CPUs.
  DeviceChoice device = DeviceChoice::kCpu;
  std::optional<cpu::Isa> isa = {};         // empty: default_isa()
  int n_threads = 0;                        // 0: one per core
  std::optional<WeightFormat> format = {};  // empty: as stored, or what fits the memory
  int max_rows = 0;                         // of a request
  // Whether it has experts of the MTP layers too: kMtp yes, kOff no, kAuto as ModelOptions; no
  // kLookup.
  DraftChoice draft = DraftChoice::kOff;
  double largest_mtp_share = 0.25;  // as ModelOptions
  // Whether its experts move: it loads others into spare memory, which it has for as many as it has
  // of one layer, and gives others away, as backbones ask. Not with a GPU, and not a standby.
  bool moves_experts = false;
  std::string cache = {};  // as ModelOptions
  CacheUse cache_use = CacheUse::kRead;
  LoadProgress progress = {}, write_progress = {};
  std::function<void(const std::string&)> warn = [](const std::string&) {};  // called with one line
  // Bytes of memory that a standby may use beside what it has.
  std::function<int64_t()> free_bytes = [] { return available_memory_bytes(); };
};

struct ServedDivision;
struct ServedSubject;

class LoadedExperts {
 public:
  // Throws Error for invalid options or checkpoints, and for too little memory. The calling thread
  // becomes one of the team.
  explicit LoadedExperts(const LoadedExpertsOptions& options);

  ServedExperts served() {
    ExpertLoader* const loader =
        standby_ ? static_cast<ExpertLoader*>(standby_.get()) : moving_.get();
    return {config_, kernels_, *pool_, *team_, welcome_, loader};
  }
  // Where the experts are, in one line.
  std::string places() const;
  int64_t spare_bytes() const { return spare_bytes_; }  // for experts that move; 0: they stay
  const StandbyExperts* standby() const { return standby_.get(); }  // null: it is none
  CpuExperts& experts() { return *experts_; }                       // those that are not on a GPU
  const LoadReport& load_report() const { return report_; }

 private:
  ServedSubject subject(ModelWeights& stored) const;
  void load(const LoadedExpertsOptions& options, const ServedDivision& division);
  void describe(const LoadedExpertsOptions& options, const ServedDivision& division);
  void add_mtp(const LoadedExpertsOptions& options, ServedDivision& division);
  void prepare_moves(const LoadedExpertsOptions& options, const ServedDivision& division);
  void prepare_standby(const LoadedExpertsOptions& options, LoadPlan plan);

  ModelConfig config_;  // complete before anything refers to it
  const cpu::KernelTable kernels_;
  const Topology topology_;
  OpenCheckpoint checkpoint_;  // empty once loaded, but of a standby
  CpuWeights home_{kernels_, topology_};
  ModelWeights weights_;
  LoadReport report_;
  std::unique_ptr<Team> team_;
  std::unique_ptr<CpuExperts> experts_;
  std::unique_ptr<GpuExperts> gpu_;  // null: no expert is on a GPU
  ExpertPool* pool_ = nullptr;       // of all experts
  std::unique_ptr<ProgressWatch> watch_;
  std::vector<bool> of_each_layer_;  // [n_experts] that it has from the start
  WorkerWelcome welcome_;
  int64_t spare_bytes_ = 0;
  // The last members: their threads use others.
  std::unique_ptr<StandbyExperts> standby_;
  std::unique_ptr<MovingExperts> moving_;
};

// Whether experts of all layers round rows to BF16, stored like this and kept in this layout.
bool takes_bf16(const cpu::KernelTable& kernels, const ModelWeights& stored,
                const ExpertsLayout& layout, const ModelConfig& config);

}  // namespace tandem
