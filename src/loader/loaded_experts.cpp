#include "loader/loaded_experts.h"

#include <cstdio>
#include <cstdlib>

#include "core/machine_info.h"
#include "core/memory.h"
#include "io/json.h"
#include "loader/arithmetic.h"
#include "loader/served_division.h"
#include "loader/weights/model_identity.h"
#include "loader/weights/mtp_layers.h"
#include "loader/weights/pack_weights.h"
#include "model/checkpoint.h"
#include "offload/workers/shards.h"

namespace tandem {
namespace {

// A thread that computes experts hangs: backbones notice that the worker ends, and no hang.
constexpr std::chrono::seconds kItemPatience(60);
[[noreturn]] void end_worker() {
  fmt::print(
      stderr,
      "error: a thread that computes experts, or the GPU, has made no progress for {} s: the "
      "worker ends; start it again\n",
      kItemPatience.count());
  std::_Exit(1);
}

}  // namespace

LoadedExperts::LoadedExperts(const LoadedExpertsOptions& options)
    : config_(ModelConfig::from_directory(options.directory)),
      kernels_(cpu::kernels_for(options.isa ? *options.isa : default_isa())),
      topology_(with_threads(this_topology(), options.n_threads)) {
  for (const std::string& line : topology_.notes) options.warn(line);
  require(config_.router.n_experts > 0,
          "{}: the model has no routed experts: there is nothing to "
          "serve",
          options.directory);
  welcome_.is_standby = options.experts == kStandby;
  welcome_.moves_experts = options.moves_experts;
  require(!welcome_.is_standby || !options.moves_experts,
          "--experts standby and --experts-move: a standby keeps what it has loaded: leave one of "
          "them out");
  of_each_layer_ = welcome_.is_standby
                       ? std::vector<bool>(config_.router.n_experts)
                       : experts_from_text(options.experts, config_.router.n_experts, "--experts");
  checkpoint_.store = std::make_unique<WeightStore>(options.directory);
  const WeightStore& store = *checkpoint_.store;
  if (options.draft == DraftChoice::kMtp) {
    const std::string why_not = why_no_mtp(options.directory, store, config_);
    require(why_not.empty(), "--draft mtp: {}: leave it out", why_not);
    config_.n_used_mtp_layers = config_.n_mtp_layers;
  }
  checkpoint_.stored = stored_weights(store, config_);
  ServedDivision division = divide_served(options, subject(checkpoint_.stored));
  if (options.draft == DraftChoice::kAuto) add_mtp(options, division);
  load(options, division);
  team_ = std::make_unique<Team>(topology_);
  experts_ = std::make_unique<CpuExperts>(kernels_, config_, weights_, options.max_rows, *team_);
  pool_ = gpu_ ? &gpu_->with(*experts_) : experts_.get();
  watch_ = std::make_unique<ProgressWatch>(
      [this] {
        const WorkProgress cpu = team_->progress(), gpu = gpu_ ? gpu_->progress() : WorkProgress();
        return WorkProgress{cpu.has_work || gpu.has_work, cpu.events + gpu.events};
      },
      kItemPatience, end_worker);
  describe(options, division);
  if (options.moves_experts) prepare_moves(options, division);
  if (!standby_) checkpoint_ = {};
}

void LoadedExperts::load(const LoadedExpertsOptions& options, const ServedDivision& division) {
  const WeightStore& store = *checkpoint_.store;
  const LoadPlan plan = {
      .layout = {kernels_, division.in_memory},
      .cache_directory = options.cache.empty() ? default_cache_directory() : options.cache,
      .cache_use = options.cache_use,
      .n_threads = topology_.n_cores(),
      .progress = options.progress,
      .write_progress = options.write_progress,
      .warn = options.warn};
  if (welcome_.is_standby) return prepare_standby(options, plan);
  if (division.has_gpu()) {
    const GpuExpertsOptions on_gpu = {options.max_rows, topology_.n_cores(), options.progress};
    gpu_ = load_gpu_experts(store, checkpoint_.stored, config_, on_gpu, division.gpu);
  }
  if (division.has_gpu() && all_on_gpu(division.gpu)) {
    weights_ = no_experts(checkpoint_.stored, config_, home_, division.in_memory);
  } else {
    LoadedWeights loaded = load_weights(store, checkpoint_.stored, config_, plan, home_);
    weights_ = std::move(loaded.weights);
    report_ = loaded.report;
  }
}

// What backbones are told.
void LoadedExperts::describe(const LoadedExpertsOptions& options, const ServedDivision& division) {
  welcome_.model = model_identity(*checkpoint_.store);
  welcome_.n_layers = config_.n_all_layers();
  welcome_.experts.assign(welcome_.n_layers, of_each_layer_);
  welcome_.n_active = config_.router.n_active;
  welcome_.dim = static_cast<int32_t>(config_.dim);
  welcome_.max_rows = options.max_rows;
  const bool any_in_memory = !gpu_ || !all_on_gpu(division.gpu);
  welcome_.takes_bf16 = (!gpu_ || gpu_->takes_bf16()) &&
                        (!any_in_memory || tandem::takes_bf16(kernels_, checkpoint_.stored,
                                                              division.in_memory, config_));
  welcome_.arithmetic = arithmetic_text(kernels_, division.in_memory, weights_, config_);
  welcome_.on_gpu = division.on_gpu;
  if (gpu_) welcome_.gpu_arithmetic = gpu_->arithmetic();
}

std::string LoadedExperts::places() const {
  std::vector<bool> in_memory = of_each_layer_;
  for (size_t e = 0; e < welcome_.on_gpu.size(); ++e)
    if (welcome_.on_gpu[e]) in_memory[e] = false;
  const std::string others = text_of_experts(listed(in_memory));
  if (!gpu_) return fmt::format("experts {} in memory", others);
  return fmt::format("experts {} on {}{}", text_of_experts(listed(welcome_.on_gpu)),
                     gpu_->gpu_name(), others.empty() ? "" : ", " + others + " in memory");
}

ServedSubject LoadedExperts::subject(ModelWeights& stored) const {
  return {config_, stored, home_, of_each_layer_};
}

void LoadedExperts::prepare_moves(const LoadedExpertsOptions& options,
                                  const ServedDivision& division) {
  const int n = most_of_layer(division.in_memory, config_);
  spare_bytes_ = SpareExperts::bytes_for(checkpoint_.stored, config_, home_, division.in_memory, n);
  require(spare_bytes_ <= options.free_bytes(),
          "--experts-move: room for {} more experts needs {:.2f} GB of memory and {:.2f} GB are "
          "free: let the worker have fewer --experts, or keep them in int4",
          n, gigabytes(spare_bytes_), gigabytes(options.free_bytes()));
  auto checkpoint = std::make_shared<OpenCheckpoint>(std::move(checkpoint_));
  moving_ = std::make_unique<MovingExperts>(
      std::make_unique<SpareExperts>(std::move(checkpoint), config_,
                                     PackedLayout{kernels_, division.in_memory}, topology_,
                                     weights_, n),
      config_, weights_, std::max(1, topology_.n_cores() / 16));
}

// Throws Error where not even one expert fits, which would be of no use.
void LoadedExperts::prepare_standby(const LoadedExpertsOptions& options, LoadPlan plan) {
  weights_ = no_experts(checkpoint_.stored, config_, home_, plan.layout.experts);
  standby_ = std::make_unique<StandbyExperts>(StandbyParts{.store = *checkpoint_.store,
                                                           .stored = checkpoint_.stored,
                                                           .config = config_,
                                                           .topology = topology_,
                                                           .plan = std::move(plan),
                                                           .weights = weights_,
                                                           .free_bytes = options.free_bytes});
  require(standby_->n_fitting() > 0,
          "--experts standby: one expert of every layer needs {:.2f} GB of memory{} and {:.2f} GB "
          "are free: free some, or use --format int4",
          gigabytes(standby_->expert_bytes()),
          options.format ? " as " + format_name(*options.format) : "",
          gigabytes(options.free_bytes()));
}

// With experts of the MTP layers if backbones may use these, and they displace nothing.
void LoadedExperts::add_mtp(const LoadedExpertsOptions& options, ServedDivision& division) {
  const WeightStore& store = *checkpoint_.store;
  if (!why_no_mtp(options.directory, store, config_).empty() ||
      mtp_share(config_) > options.largest_mtp_share)
    return;
  const ModelConfig without = config_;
  config_.n_used_mtp_layers = config_.n_mtp_layers;
  try {
    ModelWeights all = stored_weights(store, config_);
    LoadedExpertsOptions same = options;
    same.device = division.has_gpu() ? DeviceChoice::kCuda : DeviceChoice::kCpu;
    ServedDivision with = divide_served(same, subject(all));
    const double most = kMostMemoryWithMtp * static_cast<double>(machine_info().memory_bytes);
    const int64_t bytes = packed_bytes(all, config_, home_, with.in_memory);
    require(static_cast<double>(bytes) <= most &&
                with.in_memory.conversions() == division.in_memory.conversions(),
            "memory is too small for them");
    require(with.on_gpu == division.on_gpu, "the GPU has room for fewer experts with them");
    checkpoint_.stored = std::move(all);
    division = std::move(with);
  } catch (const Error& why) {
    config_ = without;
    options.warn(fmt::format(
        "the experts of the layer for multi-token prediction are not loaded: {}", why.what()));
  }
}

bool takes_bf16(const cpu::KernelTable& kernels, const ModelWeights& stored,
                const ExpertsLayout& layout, const ModelConfig& config) {
  for (int layer = 0; layer < config.n_all_layers(); ++layer) {
    if (!config.is_moe(layer)) continue;
    const DType of_stored = stored.layers[layer].experts[0].gate.q.dtype;
    const DType packed = of_stored == DType::kI4Words ? DType::kI4 : of_stored;
    const std::optional<WeightFormat>& format = layout.format(layer);
    if (activation_for(kernels, format ? format->dtype : packed) != cpu::ActivationType::kBF16)
      return false;
  }
  return true;
}

}  // namespace tandem
