#include "loader/loaded_model.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "core/machine_info.h"
#include "core/program_files.h"
#include "io/json.h"
#include "io/weight_store.h"
#include "loader/pack_weights.h"
#include "model/checkpoint.h"

namespace tandem {
namespace {

int64_t choose_context(const ModelOptions& options, const ModelConfig& config,
                       const std::optional<ExecutedParts>& placed) {
  require(options.context >= 0 && options.context <= (int64_t{1} << 30),
          "--ctx {}: must be between 1 and 2^30", options.context);
  require(!placed || options.context <= placed->kv_tokens,
          "--ctx {}: {} reserves {} tokens of KV cache: make one of them fit the other",
          options.context, options.placement, placed ? placed->kv_tokens : 0);
  if (options.context > 0) return options.context;
  return placed ? placed->kv_tokens : std::min<int64_t>(config.max_context, kDefaultContext);
}

std::optional<ExecutedParts> placed_by(const ModelOptions& options, const ModelConfig& config,
                                       const Topology& topology, bool on_gpu) {
  if (options.placement.empty()) return {};
  require(options.experts == "auto",
          "both --placement and --experts {}: the placement says in which format experts are kept",
          options.experts);
  ExecutedParts parts = parts_of_file(
      options.placement, config,
      {topology, machine_info().memory_bytes, on_gpu ? this_gpu() : std::optional<Gpu>()});
  require(parts.gpu.has_value() == on_gpu,
          "--device {}: the backbone of {} is on the CPU: use --device cpu", options.device,
          options.placement);
  return parts;
}

int64_t kv_tokens(const ModelOptions& options, const ModelConfig& config, int64_t context,
                  DType cache_type) {
  if (options.max_kv_tokens <= context) return context;
  const auto bytes =
      static_cast<int64_t>(options.kv_fraction * static_cast<double>(available_memory_bytes()));
  const int64_t fitting = bytes / KvCache::bytes_for(config, kPageSize, cache_type) * kPageSize;
  return std::clamp(fitting, context, options.max_kv_tokens);
}

// What host memory holds besides the CPU's experts.
struct HostPart {
  const std::vector<std::vector<bool>>& elsewhere;  // as in ExpertsLayout
  int64_t other_bytes;                              // besides weights
};

// The layout in the format of --experts, or as stored.
ExpertsLayout choose_experts(const ModelOptions& options, ModelWeights& stored,
                             const ModelConfig& config, const CpuWeights& home,
                             const HostPart& part) {
  const int64_t memory = machine_info().memory_bytes;
  const auto layout = [&](std::optional<WeightFormat> format) {
    ExpertsLayout experts(format);
    experts.keep_elsewhere(part.elsewhere);
    return experts;
  };
  const auto bytes = [&](std::optional<WeightFormat> format) {
    return packed_bytes(stored, config, home, layout(format)) + part.other_bytes;
  };
  std::optional<WeightFormat> chosen;
  if (options.experts != "auto") chosen = weight_format(options.experts);
  if (chosen && chosen->dtype == DType::kI4 && chosen->group == config.expert_group) chosen = {};
  int64_t needed = bytes(chosen);
  const char* smaller[] = {"int8", "int4"};
  for (const char* name : smaller) {
    if (options.experts != "auto" || needed <= memory) break;
    chosen = weight_format(name);
    needed = bytes(chosen);
  }
  require(needed <= memory,
          "the model needs {:.1f} GB of memory with its KV cache and this machine has {:.1f} GB: "
          "use a smaller model, a smaller --ctx or --experts int4",
          needed * 1e-9, memory * 1e-9);
  if (options.experts == "auto" && chosen)
    options.warn(fmt::format("memory is too small for the experts as stored: they are kept as {}",
                             format_name(*chosen)));
  return layout(chosen);
}

bool all_on_gpu(const GpuParts& parts) {
  return std::all_of(parts.experts.begin(), parts.experts.end(), [](const auto& layer) {
    return std::find(layer.begin(), layer.end(), false) == layer.end();
  });
}

// Watchdog limit: a job takes milliseconds. Neither a hung thread nor the GPU that waits for it can
// be stopped without ending the program.
constexpr std::chrono::seconds kTeamPatience(60);
[[noreturn]] void end_program() {
  fmt::print(stderr,
             "error: a thread that computes experts has ended no piece of work for {} s, and the "
             "GPU waits for it: the program ends; start it again\n",
             kTeamPatience.count());
  std::_Exit(1);
}

// The cache type on a GPU: as placed, else BF16 for auto because FP8 costs some accuracy.
DType gpu_cache_type(const ModelOptions& options, const std::optional<ExecutedParts>& placed) {
  const std::optional<DType> type = wanted_cache_type(options.kv);
  if (!type) return placed ? placed->kv_type : DType::kBF16;
  require(!placed || placed->kv_type == *type,
          "both --placement and --kv {}: {} has a KV cache of another type", options.kv,
          options.placement);
  return *type;
}

// auto falls back to the CPU with a warning.
bool uses_gpu(const ModelOptions& options) {
  require(options.device == "auto" || options.device == "cpu" || options.device == "cuda",
          "--device {}: choose auto, cpu or cuda", options.device);
  if (options.device != "auto") return options.device == "cuda";
  const std::string why_not = why_no_gpu();
  if (!why_not.empty()) options.warn(fmt::format("the CPU computes: {}", why_not));
  return why_not.empty();
}

}  // namespace

LoadedModel::LoadedModel(const ModelOptions& options, const Progress& progress)
    : config_(ModelConfig::from_directory(options.directory)),
      kernels_(cpu::kernels_for(choose_isa(options.isa))),
      topology_(with_threads(this_topology(), options.n_threads)),
      on_gpu_(uses_gpu(options)),
      placed_(placed_by(options, config_, topology_, on_gpu_)),
      context_(choose_context(options, config_, placed_)) {
  for (const std::string& line : topology_.notes) options.warn(line);
  on_gpu_ = on_gpu_ && load_on_gpu(options, progress);
  if (!on_gpu_) load_on_cpu(options, progress);
}

// Places the backbone and as many experts as are placed there or fit on the GPU, and the others on
// the CPU. Decides everything and checks memory before loading. Returns false if the CPU is to
// compute.
bool LoadedModel::load_on_gpu(const ModelOptions& options, const Progress& progress) {
  const DType cache_type = gpu_cache_type(options, placed_);
  const WeightStore store(options.directory);
  ModelWeights stored = stored_weights(store, config_);
  const int max_tokens = step_tokens(options, std::max(context_, options.max_kv_tokens));
  const StepLimits limits = {max_tokens, std::min(max_tokens, options.max_logits)};
  const GpuModelOptions gpu = {.max_tokens = limits.max_tokens,
                               .max_logits = limits.max_logits,
                               .context = context_,
                               .kv_fraction = placed_ ? 1 : options.kv_fraction,
                               .most_kv_tokens = options.max_kv_tokens == 0 ? 0
                                                 : placed_                  ? placed_->kv_tokens
                                                                            : options.max_kv_tokens,
                               .cache_type = cache_type,
                               .fp8_activations = fp8_activations(options.activations),
                               .n_threads = topology_.n_cores(),
                               .progress = progress};
  const std::optional<GpuShare> share = gpu_share(options, stored, gpu);
  if (!share) return false;
  const auto& [parts, kv_tokens] = *share;
  const bool shares = !all_on_gpu(parts);
  ExpertsLayout on_cpu;
  if (shares)
    on_cpu = placed_ ? placed_->experts
                     : choose_experts(options, stored, config_, home_, {parts.experts, 0});

  gpu_ = load_gpu_model(store, stored, config_, gpu, parts);
  report_ = gpu_->report();
  if (shares) {
    const LoadReport host = load_host_weights(options, store, stored, on_cpu, progress);
    report_.seconds += host.seconds;
    report_.bytes += host.bytes;
    start_team(options, max_tokens);
    if (options.record_timeline) timeline_ = std::make_unique<Timeline>();
    gpu_->add_cpu_experts(*experts_, timeline_.get());
  }
  require(shares || !options.record_timeline, "--timeline: all of the model is on the GPU");
  if (options.record_routing) gpu_->record_routing();
  model_ = std::make_unique<StepRunner>(
      ModelParts{config_, gpu_->weights(), gpu_->device(), gpu_->ops(), gpu_->experts()}, limits,
      options.attention);
  const int64_t bytes = KvCache::bytes_for(config_, kv_tokens, cache_type);
  cache_ =
      std::make_unique<KvCache>(config_, kv_tokens, cache_type, gpu_->device().allocate(bytes));
  add_host_pages(options);
  return true;
}

// With --device auto, a model that the GPU does not support runs on the CPU with a warning, unless
// a placement names the GPU.
std::optional<GpuShare> LoadedModel::gpu_share(const ModelOptions& options, ModelWeights& stored,
                                               const GpuModelOptions& gpu) const {
  try {
    GpuShare share = choose_gpu_share(stored, config_, gpu, placed_ ? placed_->gpu : std::nullopt);
    require(options.experts == "auto" || !all_on_gpu(share.parts),
            "--experts {}: a GPU keeps routed experts as the checkpoint stores them; leave it out",
            options.experts);
    return share;
  } catch (const Error& why) {
    if (options.device != "auto" || placed_) throw;
    options.warn(fmt::format("the CPU computes: {}", why.what()));
    return {};
  }
}

// Uses the memory that is free after everything else is allocated.
void LoadedModel::add_host_pages(const ModelOptions& options) {
  const int n = host_pages_for({.gpu_pages = cache_->n_pages(),
                                .most_pages = options.max_kv_tokens / kPageSize,
                                .page_bytes = KvCache::bytes_for(config_, kPageSize, cache_type()),
                                .memory_bytes = available_memory_bytes()});
  if (n > 0) host_pages_ = std::make_unique<HostPages>(gpu_->device(), *cache_, n);
}

void LoadedModel::load_on_cpu(const ModelOptions& options, const Progress& progress) {
  require(!options.record_timeline, "--timeline shows GPU and CPU side by side: use --device cuda");
  const DType cache_type = cache_type_for(kernels_);
  require(options.kv == "auto" || options.kv == (cache_type == DType::kBF16 ? "bf16" : "fp32"),
          "--kv {}: on the CPU the KV cache is {}; leave it out, or use --device cuda", options.kv,
          cache_type == DType::kBF16 ? "bf16" : "fp32");
  require(!fp8_activations(options.activations),
          "--activations fp8: the CPU does not round them so; leave it out, or use --device cuda");
  const int max_tokens = step_tokens(options, std::max(context_, options.max_kv_tokens));
  const WeightStore store(options.directory);
  ModelWeights stored = stored_weights(store, config_);
  const ExpertsLayout experts =
      placed_ ? placed_->experts
              : choose_experts(options, stored, config_, home_,
                               {{}, KvCache::bytes_for(config_, context_, cache_type)});
  report_ = load_host_weights(options, store, stored, experts, progress);
  start_team(options, max_tokens);
  device_ = std::make_unique<CpuDevice>(*team_);
  ops_ = std::make_unique<CpuOps>(kernels_, config_, max_tokens, *team_);
  if (options.record_routing) {
    recorder_ = std::make_unique<RoutingRecorder>(config_);
    experts_->observe(recorder_.get());
  }
  model_ = std::make_unique<StepRunner>(
      ModelParts{config_, weights_, *device_, *ops_, *experts_},
      StepLimits{max_tokens, std::min(max_tokens, options.max_logits)}, options.attention);
  cache_ = std::make_unique<KvCache>(config_, kv_tokens(options, config_, context_, cache_type),
                                     cache_type);
}

int LoadedModel::step_tokens(const ModelOptions& options, int64_t most) const {
  return static_cast<int>(
      std::min<int64_t>(placed_ ? placed_->chunk_tokens : options.step_tokens, most));
}

LoadReport LoadedModel::load_host_weights(const ModelOptions& options, const WeightStore& store,
                                          ModelWeights& stored, const ExpertsLayout& experts,
                                          const Progress& progress) {
  const LoadPlan plan = {
      .layout = {kernels_, experts},
      .cache_directory = options.cache.empty() ? default_cache_directory() : options.cache,
      .cache_use = options.cache_use,
      .n_threads = topology_.n_cores(),
      .progress = progress,
      .write_progress = options.write_progress,
      .warn = options.warn};
  LoadedWeights loaded = load_weights(store, stored, config_, plan, home_);
  weights_ = std::move(loaded.weights);
  if (!home_.is_bound())
    options.warn(
        "the experts' memory cannot be bound to all its NUMA nodes (no right to, as in a container "
        "without SYS_NICE, or too little room on a node): expect less speed");
  return loaded.report;
}

// Called after loading: threads created later would inherit this thread's CPU affinity.
void LoadedModel::start_team(const ModelOptions& options, int max_tokens) {
  team_ = std::make_unique<Team>(topology_);
  if (team_->n_unpinned() > 0)
    options.warn(fmt::format("{} of {} threads cannot be pinned to their cores: expect less speed",
                             team_->n_unpinned(), team_->size()));
  experts_ = std::make_unique<CpuExperts>(kernels_, config_, weights_, max_tokens, *team_);
  if (on_gpu_) watch_ = std::make_unique<TeamWatch>(*team_, kTeamPatience, end_program);
}

std::optional<DType> wanted_cache_type(const std::string& option) {
  require(option == "auto" || option == "bf16" || option == "fp8",
          "--kv {}: choose auto, bf16 or fp8", option);
  if (option == "auto") return {};
  return option == "fp8" ? DType::kF8E4M3 : DType::kBF16;
}

bool fp8_activations(const std::string& option) {
  require(option == "bf16" || option == "fp8", "--activations {}: choose bf16 or fp8", option);
  return option == "fp8";
}

cpu::Isa choose_isa(const std::string& option) {
  const char* variable = std::getenv("TANDEM_ISA");
  const std::string name = option == "auto" && variable && *variable ? variable : option;
  const cpu::Isa best = cpu::best_isa();
  if (name == "auto") return best;
  std::string known, here;
  for (int i = 0; i < cpu::kNumIsas; ++i) {
    const auto isa = static_cast<cpu::Isa>(i);
    known += std::string(", ") + cpu::name_of(isa);
    if (isa <= best) here += std::string(here.empty() ? "" : ", ") + cpu::name_of(isa);
    if (name != cpu::name_of(isa)) continue;
    require(isa <= best, "instruction set {}: this machine does not have it; it has {}", name,
            here);
    return isa;
  }
  fail("unknown instruction set {}: choose one of auto{}", name, known);
}

std::string embedded_model() {
  const std::string folder = program_file("models/tiny-r1");
  require(!folder.empty(),
          "the embedded model is missing (looked for {}): install the program with `make install`, "
          "or name a model directory",
          fmt::join(program_file_places("models/tiny-r1"), ", "));
  return folder;
}

}  // namespace tandem
