#include "loader/gpu_model.h"

#include <algorithm>
#include <optional>

#include "comm/agreement.h"
#include "core/clock.h"
#include "core/progress_watch.h"
#include "loader/grid_groups.h"
#include "model/checkpoint.h"
#include "offload/gpu/cuda_rank_experts.h"
#include "offload/gpu/cuda_replicas.h"
#include "offload/gpu/cuda_routing_recorder.h"
#include "offload/gpu/cuda_served_experts.h"
#include "offload/gpu/exchange/cuda_exchanged_experts.h"
#include "offload/gpu/hybrid_experts.h"
#include "ops/cuda_device.h"
#include "ops/cuda_ops.h"
#include "ops/cuda_weights.h"
#include "with_gpu/connected_gpus.h"
#include "with_gpu/gpu_expert_mover.h"
#include "with_gpu/gpu_weights.h"

namespace tandem {
namespace {

// Experts of other ranks' rows are computed by the GPU alone in a step that is divided.
int micro_batches_of(const GpuModelOptions& options, const GpuParts& parts) {
  return all_on_gpu(parts) ? options.micro_batches : 1;
}

// How rows of replicas are to travel.
CudaWaysAsked ways_asked(const GpuModelOptions& options, const GpuParts& parts) {
  return {.mode = options.exchange,
          .sends_parcels = all_on_gpu(parts) && !parts.expert_columns,
          .hosts = options.hosts,
          .grid = options.grid.of_stage(),
          .max_tokens = options.max_tokens,
          .micro_batches = micro_batches_of(options, parts),
          .rows = options.rows};
}

bool any_on_gpu(const GpuParts& parts) {
  return std::any_of(parts.experts.begin(), parts.experts.end(), [](const auto& layer) {
    return std::find(layer.begin(), layer.end(), true) != layer.end();
  });
}

// Scratch rows per step; 0 without GPU experts.
int rows_needed(const GpuParts& parts, const GpuModelOptions& options) {
  return any_on_gpu(parts) || parts.stream_from_tokens != 0 ? options.expert_tokens() : 0;
}

CudaLimits limits_of(const GpuModelOptions& options, const gpu::GpuInfo& gpu_info) {
  return {.max_tokens = options.max_tokens,
          .context = options.context,
          .n_multiprocessors = gpu_info.n_multiprocessors,
          .bytes_per_second = gpu_info.bytes_per_second,
          .fp8_activations = options.fp8_activations};
}

// The model with the attention heads of a rank, and with the columns of its experts, for the sizes
// of scratch.
ModelConfig with_heads_of_rank(ModelConfig config, const std::optional<BackboneShare>& share) {
  if (share && share->heads.n > 0) config.mla.n_heads = static_cast<int>(share->heads.n);
  return config;
}
ModelConfig with_experts_of_rank(ModelConfig config, const GpuParts& parts) {
  if (parts.expert_columns) config.expert_dim = static_cast<int>(parts.expert_columns->n);
  return config;
}

int64_t bytes_beside_weights(const ModelWeights& stored, const ModelConfig& config,
                             const GpuModelOptions& options, const gpu::GpuInfo& gpu_info,
                             const GpuParts& parts, int64_t kv_tokens) {
  // Used by CUDA itself, its modules and recorded steps.
  constexpr int64_t kContextBytes = CudaDevice::kContextBytes + CudaDevice::kRecordedBytes;
  const ModelConfig of_rank = with_heads_of_rank(config, options.share);
  const int n = options.expert_tokens(), n_served = options.served_tokens();
  const bool serves = options.exchanges_on_host && any_on_gpu(parts);
  return CudaOps::bytes_for(of_rank, limits_of(options, gpu_info)) +
         CudaExpertRows::bytes_for(with_experts_of_rank(config, parts),
                                   rows_needed(parts, options)) +
         (!all_on_gpu(parts) || options.exchanges_on_host ? HybridExperts::bytes_for(config, n)
                                                          : 0) +
         (serves ? CudaExpertRows::bytes_for(config, n_served) +
                       CudaServedExperts::bytes_for(config, n_served)
                 : 0) +
         (parts.stream_from_tokens != 0 ? CudaStreaming::bytes_for(config, n) : 0) +
         (parts.on_other_ranks.empty() ? 0 : ExpertPlaces::bytes_for(config, n)) +
         (!options.beside_cpus && (options.replicated_experts || options.grid.n_replicas > 1)
              ? CudaOwners::bytes_for(config.n_all_layers(), config.router.n_experts,
                                      options.grid.n_of_stage())
              : 0) +
         (options.beside_cpus           ? 0
          : options.grid.n_replicas > 1 ? cuda_ways_bytes(config, ways_asked(options, parts))
          : options.replicated_experts  ? CudaReplicas::bytes_for(n, config.router.n_active)
                                        : 0) +
         (options.moves_experts ? GpuExpertSlots::bytes_for(stored, spare_experts(parts)) : 0) +
         DeepSeek::bytes_for(of_rank, {options.max_tokens, options.max_logits},
                             options.share ? *options.share : whole_backbone(config)) +
         KvCache::bytes_for(config, kv_tokens, options.cache_type,
                            options.share ? options.share->layers : kAllLayers) +
         (gpu_info.emulated ? 0 : kContextBytes);
}

// Rates for the emulated GPU, for which measured ones are meaningless: GPU and CPU both get some
// experts.
ExpertRates emulated_rates() {
  return {.link_seconds = 1, .copy_seconds = 0.1, .gpu = {{{1, 0.1}}}, .cpu = {{{1, 0.25}}}};
}

class Loaded final : public GpuModel {
 public:
  Loaded(const WeightStore& store, ModelWeights& stored, const ModelConfig& config,
         const GpuModelOptions& options, const GpuParts& parts)
      : config_(config),
        max_tokens_(options.max_tokens),
        fp8_activations_(options.fp8_activations),
        max_logits_(options.max_logits),
        expert_tokens_(options.expert_tokens()),
        served_tokens_(options.served_tokens()),
        has_experts_(any_on_gpu(parts)),
        exchanges_on_host_(options.exchanges_on_host),
        ways_(ways_asked(options, parts)),
        grid_(options.grid),
        stream_from_(parts.stream_from_tokens),
        micro_batches_from_(parts.micro_batches_from_sequences),
        patience_(options.patience),
        gpu_info_(gpu::open_gpu()),
        config_of_rank_(with_heads_of_rank(config, options.share)),
        config_of_experts_(with_experts_of_rank(config, parts)),
        on_other_ranks_(parts.on_other_ranks),
        n_spare_experts_(spare_experts(parts)),
        device_(stream_, options.records && !options.beside_cpus,
                options.share ? CudaDevice::kAnyBytes : CudaDevice::kRecordedBytes),
        weights_(weights_of_rank(options.share, parts)) {
    load(store, stored, options, parts);
    ops_ = std::make_unique<CudaOps>(config_of_rank_, limits_of(options, gpu_info_), stream_);
    rows_ = std::make_unique<CudaExpertRows>(config_of_experts_, rows_needed(parts, options),
                                             stream_, options.fp8_activations);
    gpu_experts_ = std::make_unique<CudaExperts>(config_of_experts_, weights_, *rows_, stream_);
    if (!on_other_ranks_.empty() && all_on_gpu(parts) && !exchanges_on_host_)
      rank_experts_ = std::make_unique<CudaRankExperts>(config, weights_, on_other_ranks_,
                                                        expert_tokens_, *gpu_experts_, stream_);
  }

  const std::string& gpu_name() const override { return gpu_info_.name; }
  // GPUs of one compute capability have the same tensor cores.
  std::string arithmetic() const override {
    return fmt::format("{} of compute capability {}.{}{}",
                       gpu_info_.emulated ? "emulated GPU" : "GPU", gpu_info_.major,
                       gpu_info_.minor, fp8_activations_ ? " with FP8 activations" : "");
  }
  const ModelWeights& weights() const override { return weights_; }
  const LoadReport& report() const override { return report_; }
  Device& device() override { return device_; }
  Ops& ops() override { return *ops_; }
  ExpertPool& experts() override {
    if (exchanged_) return *exchanged_;
    if (replicas_) return *replicas_;
    if (hybrid_) return *hybrid_;
    if (rank_experts_) return *rank_experts_;
    return *gpu_experts_;
  }
  void join(Group& ranks, const ExpertOwners& owners,
            const std::function<void()>& on_hang) override {
    const GridGroups groups(ranks, grid_, weights_.share_of(config_).by_replicas);
    stage_ = connected(groups.stage());
    device_.use(*stage_);
    ops_->watch(*stage_);
    if (grid_.tp > 1 && grid_.n_replicas > 1) replica_ = connected(groups.replica());
    if (grid_.tp > 1) ops_->use(replica_ ? *replica_ : *stage_);
    if (groups.before()) before_ = connected(*groups.before());
    if (groups.after()) after_ = connected(*groups.after());
    ops_->use_stages(before_.get(), after_.get());
    if (groups.like_ranks()) {
      like_ranks_ = connected(*groups.like_ranks());
      ops_->use_replicas(*like_ranks_);
    }
    if (owners.has_replicas() || grid_.n_replicas > 1)
      owners_ = std::make_unique<CudaOwners>(owners, stage_->rank(), stage_->n_ranks(), stream_);
    if (grid_.n_replicas > 1)
      exchange_rows(groups.stage(), owners, on_hang);
    else if (owners_)
      replicas_ = std::make_unique<CudaReplicas>(*owners_, experts(), expert_tokens_,
                                                 config_.router.n_active);
  }
  void use(const RankGroups& ranks) override {
    const int64_t n =
        std::max({int64_t{max_tokens_} * config_.dim, int64_t{max_logits_} * config_.vocab,
                  int64_t{max_tokens_} * 2 * config_.router.n_active});
    ops_->use(ranks, n * int64_t{sizeof(float)});
  }
  std::string ways_of_rows() const override { return exchanged_ ? exchanged_->ways().said() : ""; }
  // A rank that waits for its stage's or for another stage.
  WorkProgress progress() const override {
    if (!stage_) return {};
    return {stage_->has_work(), passed_calls() + (exchanged_ ? exchanged_->progress() : 0)};
  }
  ExpertPool& served_experts(CpuExperts& cpu) override {
    if (!has_experts_) return cpu;
    served_stream_ = std::make_unique<gpu::Stream>();
    served_rows_ = std::make_unique<CudaExpertRows>(config_, served_tokens_, *served_stream_,
                                                    fp8_activations_);
    served_on_gpu_ =
        std::make_unique<CudaExperts>(config_, weights_, *served_rows_, *served_stream_);
    served_ = std::make_unique<CudaServedExperts>(
        config_,
        CudaServedExperts::Parts{
            .on_gpu = weights_, .gpu = *served_on_gpu_, .cpu = cpu, .stream = *served_stream_},
        served_tokens_);
    return *served_;
  }
  void add_cpu_experts(CpuExperts& experts, ExpertPool* others, Timeline* timeline) override {
    const bool gpu_waits = !gpu_info_.ends_long_kernels;
    std::vector<cpu::ActivationType> rows = experts.activations();
    if (others) rows.assign(rows.size(), cpu::ActivationType::kF32);  // what they take
    ExpertPool& on_cpu = others ? *others : experts;
    // Where rows are exchanged all other experts are those of `others`. The ranks of a replica send
    // a part of its tokens each, also those that the GPU has experts of.
    std::vector<std::vector<bool>> on_others;
    if (!exchanges_on_host_) on_others = on_other_ranks_;
    hybrid_ = std::make_unique<HybridExperts>(
        config_,
        HybridExperts::Parts{.weights = weights_,
                             .on_gpu = *gpu_experts_,
                             .on_cpu = on_cpu,
                             .rows_on_cpu = rows,
                             .stream = stream_,
                             .on_other_ranks = on_others,
                             .hands_all_down = exchanges_on_host_ && grid_.tp > 1,
                             .team = &experts.team(),
                             .patience = patience_,
                             .gpu_waits = gpu_waits},
        expert_tokens_);
    gpu_waits ? device_.launch_beside_follow() : device_.record_nothing();
    HybridExperts::Division division = {.micro_batches_from = others ? 0 : micro_batches_from_};
    if (stream_from_ != 0 && (stream_from_ > 0 || CudaStreaming::takes(experts))) {
      streaming_ =
          std::make_unique<CudaStreaming>(config_, experts, *rows_, expert_tokens_, stream_);
      streaming_->divide_by(gpu_info_.emulated ? emulated_rates()
                                               : streaming_->measured_rates(expert_tokens_));
      division.stream_from = stream_from_ > 0
                                 ? stream_from_
                                 : hybrid_->measured_crossover(expert_tokens_, *streaming_);
      division.streaming = streaming_.get();
    }
    hybrid_->divide(division);
    if (timeline) hybrid_->record(*timeline);
  }
  std::unique_ptr<ExpertMover> mover(GpuMoverParts parts) override {
    const auto moved = [this](int layer, std::span<const int32_t> places) {
      if (hybrid_) hybrid_->moved(layer, places);
      if (rank_experts_) rank_experts_->moved(layer, places);
    };
    const auto owners = [this] {
      if (owners_) owners_->read();
      if (hosts_) hosts_->read();
    };
    auto slots = std::make_unique<GpuExpertSlots>(
        parts.checkpoint, config_, weights_,
        CudaExperts::places(config_, weights_, on_other_ranks_), stream_, n_spare_experts_);
    return std::make_unique<GpuExpertMover>(std::move(parts), std::move(slots),
                                            GpuExpertMover::Followers{moved, owners});
  }
  void record_routing() override {
    recorder_ = std::make_unique<CudaRoutingRecorder>(config_, max_tokens_, stream_);
    experts().observe(recorder_.get());
  }
  const RoutingCounts* routing() const override {
    return recorder_ ? &recorder_->counts() : nullptr;
  }

 private:
  void load(const WeightStore& store, ModelWeights& stored, const GpuModelOptions& options,
            const GpuParts& parts);
  void exchange_rows(Group& stage, const ExpertOwners& owners,
                     const std::function<void()>& on_hang);
  // A number that changes while the GPU passes calls of other ranks.
  uint64_t passed_calls() const {
    uint64_t passed = 0;
    for (const auto* others :
         {&stage_, &replica_, &before_, &after_, &like_ranks_, &within_, &plane_})
      if (*others) passed += (*others)->progress();
    return passed;
  }

  const ModelConfig& config_;
  const int max_tokens_;
  const bool fp8_activations_;
  const int max_logits_, expert_tokens_, served_tokens_;
  const bool has_experts_, exchanges_on_host_;
  CudaWaysAsked ways_;  // of replicas
  const BackboneGrid grid_;
  const int stream_from_, micro_batches_from_;
  const std::chrono::duration<double> patience_;
  const gpu::GpuInfo gpu_info_;
  const ModelConfig config_of_rank_, config_of_experts_;
  const std::vector<std::vector<bool>> on_other_ranks_;
  const int n_spare_experts_;
  gpu::Stream stream_;
  std::unique_ptr<gpu::Stream> network_;  // null: one replica, or some ranks have no GPU
  // The GPUs of other ranks, as in GridGroups and, where rows cross once to each host, in
  // HostGroups; null: there are none.
  std::unique_ptr<gpu::Collectives> stage_, replica_, before_, after_, like_ranks_, within_, plane_;
  std::unique_ptr<CudaRoutingRecorder> recorder_;  // null: routing is not recorded
  CudaDevice device_;
  CudaWeights home_, host_home_;  // host_home_: read by the GPU over the link
  ModelWeights weights_;
  LoadReport report_;
  std::unique_ptr<CudaOps> ops_;
  std::unique_ptr<CudaExpertRows> rows_;
  std::unique_ptr<CudaExperts> gpu_experts_;
  std::unique_ptr<CudaStreaming> streaming_;
  std::unique_ptr<CudaRankExperts> rank_experts_;  // null: no other rank, or experts on the CPU
  std::unique_ptr<HybridExperts> hybrid_;          // null: all experts are on the GPU
  // For rows of other ranks; null: none arrive, or no expert is on the GPU.
  std::unique_ptr<gpu::Stream> served_stream_;
  std::unique_ptr<CudaExpertRows> served_rows_;
  std::unique_ptr<CudaExperts> served_on_gpu_;
  std::unique_ptr<CudaServedExperts> served_;
  std::unique_ptr<CudaOwners> owners_;      // null: one replica, and every expert is on one rank
  std::unique_ptr<CudaHosts> hosts_;        // null: within_ is
  std::unique_ptr<CudaReplicas> replicas_;  // null: one of both
  std::unique_ptr<CudaExchangedExperts> exchanged_;  // null: one replica
};

// An emulated GPU measures nothing.
void Loaded::exchange_rows(Group& stage, const ExpertOwners& owners,
                           const std::function<void()>& on_hang) {
  network_ = std::make_unique<gpu::Stream>();
  ways_.sends_parcels = least_on_all(stage, ways_.sends_parcels) > 0;
  ways_.measures = !gpu_info_.emulated;
  if (ways_.sends_parcels && ways_.hosts.has_equal_hosts()) {
    const HostGroups groups(stage, ways_.hosts);
    within_ = connected(groups.within());
    plane_ = connected(groups.plane());
    hosts_ = std::make_unique<CudaHosts>(owners, groups, *within_, *plane_, stream_);
  }
  const CudaExchange::Parts parts = {
      .config = config_,
      .ranks = *stage_,
      .owners = *owners_,
      .stream = stream_,
      .network = *network_,
      .formats = row_formats(ways_.rows, ways_.sends_parcels && !fp8_activations_),
      .hosts = hosts_.get()};
  // NCCL connects in its first calls, which may take seconds.
  constexpr std::chrono::seconds kPatience(60);
  std::optional<ProgressWatch> watch;
  if (ways_.measures)
    watch.emplace([this] { return WorkProgress{true, passed_calls()}; }, kPatience, on_hang);
  CudaWays ways = choose_cuda_ways(parts, stage, ways_);
  watch.reset();
  if (!can_record(ways.decode ? ways.of_decode.mode : ways.of_prompts.mode))
    device_.record_nothing();
  exchanged_ = std::make_unique<CudaExchangedExperts>(
      CudaExchangedExperts::Parts{.ranks = *stage_,
                                  .grid = ways_.grid,
                                  .mine = experts(),
                                  .mine_on_gpu = hybrid_ == nullptr,
                                  .micro_batches = ways_.micro_batches},
      std::move(ways));
}

// FP8 activations need weights in FP8 blocks.
void require_fp8_weights(ModelWeights& stored, const ModelConfig& config) {
  bool any = false;
  for_each_weight(stored, config, [&](const WeightSpec&, const QuantView& w) {
    any |= w.q.dtype == DType::kF8E4M3 && w.block_cols == gpu::kFp8Block;
  });
  require(any,
          "--activations fp8: the model has no FP8 weights in blocks of {} columns: leave it out",
          gpu::kFp8Block);
}

void Loaded::load(const WeightStore& store, ModelWeights& stored, const GpuModelOptions& options,
                  const GpuParts& parts) {
  store.require_unchanged();
  std::vector<LoadJob> jobs =
      upload_jobs({stored, config_, parts, options.share}, weights_, home_, host_home_);
  if (options.cache_type == DType::kF8E4M3)
    CudaAttention::require_fp8_cache(
        config_.mla, weights_.layers[weights_.share_of(config_).layers.first].attn.kv_b);
  for (const LoadJob& job : jobs) report_.bytes += job.bytes;
  const auto start = Clock::now();
  run_load_jobs(store.files(), std::move(jobs), {options.n_threads, options.progress});
  home_.finish();
  host_home_.finish();
  report_.seconds = seconds_since(start);
}

}  // namespace

void choose_gpu(int index) { gpu::choose_gpu(index); }

std::string why_no_gpu() {
  try {
    gpu::open_gpu();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

std::string id_of_gpu() { return gpu::open_gpu().id; }

Gpu this_gpu() {
  const gpu::GpuInfo gpu_info = gpu::open_gpu();
  Gpu gpu = {};
  gpu.name = gpu_info.name;
  gpu.memory_bytes = gpu_info.memory_bytes;
  return gpu;
}

void require_fp8_gpu() {
  const gpu::GpuInfo gpu_info = gpu::open_gpu();
  require(
      gpu_info.fp8_mma,
      "--activations fp8: {} has compute capability {}.{}, and FP8 on tensor cores needs 8.9 or "
      "newer and a program built for that: leave it out",
      gpu_info.name, gpu_info.major, gpu_info.minor);
}

// A hand-off that cannot work would be noticed only after loading, which takes minutes.
std::string require_hand_off(const GpuParts& parts) {
  if (all_on_gpu(parts)) return "";
  const gpu::GpuInfo gpu_info = gpu::open_gpu();
  if (gpu_info.ends_long_kernels)
    return fmt::format(
        "{} has a display, and the driver ends kernels that run for seconds: kernels do not wait "
        "for the CPU but are launched when it is done, which costs about 4 % of a step; use a GPU "
        "without a display to avoid it",
        gpu_info.name);
  gpu::Stream stream;
  const std::string why_not = gpu::why_no_hand_off(stream);
  require(why_not.empty(), "{}", why_not);
  return "";
}

GpuMemory gpu_memory(ModelWeights& stored, const ModelConfig& config,
                     const GpuModelOptions& options) {
  CudaOps::require_takes(config);
  if (options.fp8_activations) {
    require_fp8_gpu();
    require_fp8_weights(stored, config);
  }
  const gpu::GpuInfo gpu_info = gpu::open_gpu();
  return {.name = gpu_info.name,
          .free_bytes = gpu_info.free_bytes,
          .expert_bytes = std::max<int64_t>(1, GpuExpertSlots::bytes_for(stored, 1)),
          .streams = !gpu_info.emulated,
          .weight_bytes =
              [&stored, &config, share = options.share](const GpuParts& parts) {
                return weight_bytes({stored, config, parts, share}, Home::kGpu);
              },
          .other_bytes =
              [&stored, &config, options, gpu_info](const GpuParts& parts, int64_t context,
                                                    int64_t kv_tokens) {
                GpuModelOptions with_context = options;
                with_context.context = context;
                return bytes_beside_weights(stored, config, with_context, gpu_info, parts,
                                            kv_tokens);
              }};
}

std::unique_ptr<GpuModel> load_gpu_model(const WeightStore& store, ModelWeights& stored,
                                         const ModelConfig& config, const GpuModelOptions& options,
                                         const GpuParts& parts) {
  return std::make_unique<Loaded>(store, stored, config, options, parts);
}

}  // namespace tandem
