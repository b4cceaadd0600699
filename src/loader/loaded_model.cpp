#include "loader/loaded_model.h"

#include <algorithm>
#include <cstdio>

#include "comm/agreement.h"
#include "comm/delayed.h"
#include "comm/hosts.h"
#include "comm/launcher.h"
#include "core/machine_info.h"
#include "core/program_files.h"
#include "io/json.h"
#include "io/weight_store.h"
#include "loader/arithmetic.h"
#include "loader/dense_choice.h"
#include "loader/rank_gpus.h"
#include "loader/weights/model_identity.h"
#include "loader/weights/mtp_layers.h"
#include "loader/worker_expert_mover.h"
#include "offload/balance/hot_experts.h"
#include "offload/plan/placement_json.h"
#include "offload/plan/workload.h"

namespace tandem {
namespace {

// KV cache tokens on the CPU, from the memory that is free after loading.
int64_t fitting_kv_tokens(const ModelOptions& options, const ModelConfig& config,
                          DType cache_type) {
  const double available =
      static_cast<double>(available_memory_bytes()) / options.ranks.on_host.n_of_host;
  const auto bytes = static_cast<int64_t>(options.kv_fraction * available);
  return bytes / KvCache::bytes_for(config, kPageSize, cache_type) * kPageSize;
}

// Watchdog limit: a job takes milliseconds. Neither a hung thread nor the GPU that waits for it can
// be stopped without ending the program.
constexpr std::chrono::seconds kTeamPatience(60);
[[noreturn]] void end_program() {
  fmt::print(stderr,
             "error: a thread that computes experts has made no progress for {} s, and the "
             "GPU waits for it: the program ends; start it again\n",
             kTeamPatience.count());
  end_rank(1);
}

Drafting drafting_for(const ModelOptions& options) {
  const DraftChoice draft = options.draft;
  const bool decides = draft == DraftChoice::kAuto;
  // Statistics count every computed token, also drafts that are rejected.
  if (draft == DraftChoice::kOff || (decides && options.record_routing)) return {};
  return {.source = draft == DraftChoice::kMtp ? Drafting::Source::kMtp : Drafting::Source::kLookup,
          .n_tokens = options.draft_tokens > 0 ? options.draft_tokens : kUsualDraftTokens,
          .decides = decides};
}

ModelConfig config_for(const ModelOptions& options) {
  ModelConfig config = ModelConfig::from_directory(options.directory);
  require_sound(options.simulated_routing, config,
                options.ranks.group ? options.ranks.group->size() : 1);
  return config;
}

// What `make` returns, once it has on all ranks.
template <class Make>
auto agreed(const Ranks& ranks, Make make) {
  if (!ranks.group) return make();
  std::optional<decltype(make())> made;
  run_on_all(*ranks.group, [&] { made.emplace(make()); });
  return *std::move(made);
}

Topology topology_for(const ModelOptions& options) {
  const Ranks& ranks = options.ranks;
  return with_threads(share_of(this_topology(), ranks.on_host.of_cores, ranks.on_host.n_of_cores),
                      options.n_threads);
}

// What must not differ between ranks, because all compute what they do not divide. The command line
// was compared.
std::string text_of_rank(const ModelOptions& options, const cpu::KernelTable& kernels) {
  constexpr int64_t kMostBytes = 10'000'000;
  const auto text = [&](const std::string& file) {
    return file.empty() ? file : read_text_file(file, kMostBytes);
  };
  const std::string& statistics = options.simulated_routing.file;
  return fmt::format("kernels {}, config {}, placement {}, routing {}", kernels.name,
                     text(options.directory + "/config.json"), text(options.placement),
                     statistics.empty() ? "" : read_text_file(statistics, kMaxStatisticsBytes));
}

std::string text_of_tensors(const WeightStore& store) {
  return fmt::format(
      "{} tensors in {} files, checksum of their names, types, shapes and places {:016x}",
      store.tensors().size(), store.files().size(), tensors_checksum(store));
}

// As a placement says, unless the options contradict it.
DeviceChoice device_of_rank(const ModelOptions& options) {
  const DeviceChoice device = options.device;
  if (options.placement.empty() || device == DeviceChoice::kCpu) return device;
  const std::vector<bool> placed = ranks_on_gpus(placement_from_file(options.placement));
  const auto n = std::count(placed.begin(), placed.end(), true);
  const Group& group = *options.ranks.group;
  if (n == 0) return device == DeviceChoice::kAuto ? DeviceChoice::kCpu : device;
  if (std::ssize(placed) != group.size()) return device;
  return placed[group.rank()] ? DeviceChoice::kCuda : DeviceChoice::kCpu;
}

std::string text_of_ranks(const std::vector<bool>& which) {
  std::vector<int> ranks;
  for (int r = 0; r < std::ssize(which); ++r)
    if (which[r]) ranks.push_back(r);
  return fmt::format("{}", fmt::join(ranks, ", "));
}

// Experts move between ranks that each have whole ones, all on CPUs or all on GPUs, or between a
// GPU and the CPU beside it.
void require_moves(const ModelOptions& options, const ExecutedParts& parts) {
  if (!options.moves_experts) return;
  const bool whole = parts.gpu && all_on_gpu(*parts.gpu);
  if (!options.ranks.group) {
    require(parts.gpu && !whole,
            "--hot-experts live, --rebalance: {} has all experts: leave it out",
            parts.gpu ? "the GPU" : "one process on the CPU");
    return;
  }
  require(options.ranks.steps && parts.grid.n_of_stage() > 1,
          "--rebalance: a pipeline stage has one rank here: leave it out");
  require(!parts.gpu || (whole && !parts.gpu->expert_columns),
          "--rebalance: the GPUs of this placement have {}: leave it out",
          whole ? "columns of every expert" : "some experts, and CPUs the others");
}

// Begins before the team does: a later thread would inherit the CPU of the thread that begins it.
std::unique_ptr<OutputThread> thread_for_moves(const ModelOptions& options) {
  return options.moves_experts ? std::make_unique<OutputThread>() : nullptr;
}

// A GPU waits without end for a rank that is lost. The group's own calls tell which one it is.
constexpr std::chrono::seconds kGpuPatience(12);
[[noreturn]] void end_ranks(Group& group) {
  std::string why = "the GPUs of the ranks wait for each other, and no rank is lost";
  try {
    group.set_patience({std::chrono::seconds(5)});
    group.barrier();
  } catch (const GroupError& error) {
    why = error.what();
  }
  fmt::print(stderr, "error: {}\n", why);
  end_rank(1);
}

PlaceInGrid place_in_grid(const ModelOptions& options, const ExecutedParts& parts) {
  const Group* const group = options.ranks.group;
  return {parts.grid, group ? group->rank() : 0, parts.stages};
}

[[noreturn]] void end_hung_rank(std::chrono::duration<double> patience) {
  fmt::print(stderr,
             "error: the step of this rank has made no progress for {:.0f} s: all ranks end; start "
             "them again\n",
             patience.count());
  end_rank(1);
}

int64_t n_experts_on_gpu(const GpuParts& parts) {
  int64_t n = 0;
  for (const std::vector<bool>& layer : parts.experts)
    n += std::count(layer.begin(), layer.end(), true);
  return n;
}

// [layers][n_experts] the experts in the GPU's memory, of no layer without a GPU.
std::vector<std::vector<bool>> experts_on_gpu(const GpuModel* gpu) {
  std::vector<std::vector<bool>> on_gpu;
  if (!gpu) return on_gpu;
  for (const LayerWeights& layer : gpu->weights().layers) {
    std::vector<bool>& of_layer = on_gpu.emplace_back();
    for (const FfnWeights& expert : layer.experts) of_layer.push_back(!expert.gate.empty());
  }
  return on_gpu;
}

}  // namespace

void require_runs_on_ranks(const ModelOptions& options) {
  if (options.workers.any()) require_workers_of_ranks(options);
  require(options.dense_products == DenseProducts::kTandem,
          "--dense-products {}: ranks may choose different products: leave it out",
          name_of(options.dense_products));
}

LoadedModel::LoadedModel(const ModelOptions& options, const Progress& progress)
    : config_(agreed(options.ranks, [&] { return config_for(options); })),
      kernels_(
          agreed(options.ranks,
                 [&] { return cpu::kernels_for(options.isa ? *options.isa : default_isa()); })),
      topology_(agreed(options.ranks, [&] { return topology_for(options); })) {
  if (options.ranks.group)
    load_on_ranks(options, progress);
  else
    load(options, progress);
}

void LoadedModel::load_on_ranks(const ModelOptions& options, const Progress& progress) {
  Group& group = *options.ranks.group;
  run_on_all(group, [&] { require_runs_on_ranks(options); });
  require_same_on_all(group, "CPU, model, placement or routing",
                      [&] { return text_of_rank(options, kernels_); });
  if (options.simulated_hosts.empty())
    host_of_rank_ = hosts_of_ranks(group);
  else
    run_on_all(group, [&] {
      host_of_rank_ = simulated_hosts_of_ranks(options.simulated_hosts, group.size());
    });
  group.set_patience(kLoadPatience);  // ranks may read from disks of different speed
  run_on_all(group, [&] {
    ModelOptions own = options;
    choose_gpus(own);
    load(own, progress);
  });
  const Patience patience = {rank_patience(options.workers, Patience().limit)};
  group.set_patience(patience);
  groups_.set_patience(patience);  // they have that of loading
  if (options.workers.any() && options.ranks.heartbeat) options.ranks.heartbeat->go_on_in_steps();
  if (replica_experts_) watch_replica(options);
  if (!options.ranks.steps) return;
  const int number = options.ranks.steps->add(*model_, *cache_);
  if (options.ranks.steps->leads()) model_->announce_on(*options.ranks.steps, number);
}

// GPUs compute where ranks have one of their own, and CPUs on the other ranks, unless the options
// need ranks of one kind.
void LoadedModel::choose_gpus(ModelOptions& options) {
  options.device = device_of_rank(options);
  const GpusOfRanks gpus = choose_gpus_of_ranks(options.ranks, options.device);
  on_gpu_ = gpus.have;
  const std::string why_not = why_not_of_two_kinds(options);
  require(why_not.empty() || options.placement.empty() || !are_of_two_kinds(on_gpu_),
          "{} places ranks on GPUs and on CPUs, and {}: leave one of them out", options.placement,
          why_not);
  if (are_of_two_kinds(on_gpu_) && why_not.empty()) {
    options.note(fmt::format("the backbone is on the GPUs of ranks {}, and others use their CPUs",
                             text_of_ranks(on_gpu_)));
  } else if (std::find(on_gpu_.begin(), on_gpu_.end(), false) != on_gpu_.end()) {
    on_gpu_.assign(on_gpu_.size(), false);
    if (options.device != DeviceChoice::kCpu)
      options.warn(fmt::format("running on the CPUs: {}{}", gpus.why_not,
                               why_not.empty() ? "" : ", and " + why_not));
  }
  if (!on_gpu_[options.ranks.group->rank()]) options.device = DeviceChoice::kCpu;
}

// The ranks of replicas meet at the end of a step only, however long one computes: a heartbeat
// tells that a process is there, and a watch on each rank that its step gets on. One that has a
// single thread does not tell how far the products of a layer are.
void LoadedModel::watch_replica(const ModelOptions& options) {
  heartbeat_ = options.ranks.heartbeat;
  meetings_->set_patience(
      {heartbeat_ ? kLongestStep
                  : kLongestStepUnheard + rank_patience(options.workers, Patience().limit)});
  const auto usual = gpu_                 ? std::chrono::duration<double>(kTeamPatience)
                     : team_->size() == 1 ? kLongestStepUnheard
                                          : Patience().limit;
  const auto patience = rank_patience(options.workers, usual);
  replica_watch_ = std::make_unique<ProgressWatch>(
      [this] {
        const WorkProgress step = replica_experts_->progress(), team = team_->progress();
        return WorkProgress{step.has_work, step.events + team.events};
      },
      std::chrono::duration_cast<std::chrono::milliseconds>(patience),
      [patience] { end_hung_rank(patience); });
  if (!heartbeat_) return;
  heartbeat_->tell(
      this, {[this] { return replica_experts_->told(); },
             [this](std::span<const std::string> of_ranks) { replica_experts_->hear(of_ranks); }});
}

LoadedModel::~LoadedModel() {
  if (heartbeat_) heartbeat_->forget(this);
}

// Experts move between the workers, which the first rank has, and those of all ranks stay, also on
// their GPUs.
void LoadedModel::load_beside_moving_workers(ModelOptions options, const Progress& progress) {
  options.moves_experts = false;
  load(options, progress);
  if (worker_experts_) {
    mover_ = worker_mover(options, *worker_experts_, experts_on_gpu(gpu_.get()));
    expert_homes_ = *mover_->new_homes();
  } else {
    mover_ = std::make_unique<FollowingMover>();
  }
  model_->use(mover_.get());
}

void LoadedModel::load(const ModelOptions& options, const Progress& progress) {
  if (options.moves_experts && options.workers.any())
    return load_beside_moving_workers(options, progress);
  for (const std::string& line : topology_.notes) options.warn(line);
  OpenCheckpoint checkpoint{std::make_unique<WeightStore>(options.directory), {}};
  const WeightStore& store = *checkpoint.store;
  ModelWeights& stored = checkpoint.stored;
  if (options.ranks.group)
    require_same_on_all(*options.ranks.group, "checkpoint", [&] { return text_of_tensors(store); });
  drafting_ = drafting_for(options);
  if (options.draft == DraftChoice::kMtp) {
    const std::string why_not = why_no_mtp(options.directory, store, config_);
    require(why_not.empty(), "--draft mtp: {}: use --draft lookup", why_not);
    config_.n_used_mtp_layers = config_.n_mtp_layers;
  }
  stored = stored_with_mtp(store, topology_.n_cores(), config_);
  if (options.identifies) identity_ = model_identity(store);
  if (options.workers.any()) {
    Group* const group = options.ranks.group;
    asked_workers_.emplace(group ? ask_workers_of_ranks(*group, options, store, config_)
                                 : ask_workers(options, store, config_));
  }
  Decision decision = first_decision(options, stored);
  const bool is_pipeline = decision.parts.grid.n_stages > 1;
  require(
      !is_pipeline || options.draft != DraftChoice::kMtp,
      "--draft mtp: the layers for multi-token prediction follow the last of {} pipeline stages, "
      "and the embedding is on the first: use --draft lookup",
      decision.parts.grid.n_stages);
  if (drafting_.decides && !is_pipeline) add_mtp(options, store, stored, decision);
  if (every_rank_has_links(options)) make_alike(options, stored, decision);
  if (options.ranks.group && decision.parts.gpu && !decision.beside_cpus)
    decision.parts.kv_tokens = least_on_all(*options.ranks.group, decision.parts.kv_tokens);
  check((decision.parts.grid.n_replicas == 1 && !is_pipeline) || options.ranks.steps,
        "rank 0 decides the steps of replicas and stages");
  context_ = decision.context;
  const Source source = {options, checkpoint, progress};
  require_moves(options, decision.parts);
  if (decision.parts.gpu)
    load_on_gpu(source, decision);
  else
    load_on_cpu(source, decision);
  if (options.count_experts) model_->count_experts();
  if (mover_) model_->use(mover_.get());
  arithmetic_ = arithmetic_of(decision);
  expert_homes_ = tandem::expert_homes(config_, decision.parts);
  expert_homes_.n_of_host = rank_hosts(host_of_rank_, 0).n_of_host;
}

// Replicas have the same experts on their GPUs and the others in the same format, so that a token
// does not depend on which of them computes it.
void LoadedModel::make_alike(const ModelOptions& options, ModelWeights& stored,
                             Decision& decision) const {
  Group& group = *options.ranks.group;
  const int64_t n_on_gpu = decision.parts.gpu ? n_experts_on_gpu(*decision.parts.gpu) : 0;
  const int64_t least = least_on_all(group, n_on_gpu);
  if (n_on_gpu > least) {
    ModelOptions same = options;
    same.device = DeviceChoice::kCuda;
    Subject with_fewer = subject(options.ranks, stored);
    with_fewer.most_on_gpu = least;
    decision = decide(same, with_fewer);
  }
  require_same_on_all(group, "format of experts", [&] {
    std::string text = decision.parts.gpu ? "on a GPU and" : "";
    for (const WeightFormat& format : decision.parts.experts.conversions())
      text += " " + format_name(format);
    return text.empty() ? "as stored" : text;
  });
}

std::string LoadedModel::arithmetic_of(const Decision& decision) const {
  std::string text;
  if (gpu_) {
    text = gpu_->arithmetic();
    if (team_) text += fmt::format(" with {} experts", n_experts_on_gpu(*decision.parts.gpu));
  }
  if (team_)
    text +=
        (gpu_ ? ", " : "") + arithmetic_text(kernels_, decision.parts.experts, weights_, config_);
  if (provider_) text += ", dense products by " + dense_products_;
  if (decision.rows == ExpertRows::kFp8) text += ", rows of experts in FP8";
  if (owners_ && !replica_experts_) {  // else each rank adds up what workers have
    const std::string ways = exchanged_experts_ ? exchanged_experts_->modes()
                             : gpu_             ? gpu_->ways_of_rows()
                                                : "";
    const BackboneGrid grid = decision.parts.grid;
    text += arithmetic_of_ranks(
        {.grid = grid,
         .owners = *owners_,
         .has_slices = decision.parts.gpu && decision.parts.gpu->expert_columns.has_value(),
         .ways = ways,
         .ways_decide = decision.rows == ExpertRows::kFp8 ||
                        hosts_of_stage(host_of_rank_, grid, 0).has_two_levels()});
  }
  if (decision.parts.by_replicas.dense)
    text += fmt::format(", dense layers divided by {} ranks", decision.parts.grid.n_of_stage());
  if (decision.beside_cpus) text += ", GPUs on ranks " + text_of_ranks(on_gpu_);
  if (asked_workers_) text += ", workers with " + arithmetic_of_workers(*asked_workers_);
  return text;
}

// A rank takes the CPU if its GPU does not take its part, and then all do that need ranks of one
// kind. What the others have may depend on that.
Decision LoadedModel::first_decision(const ModelOptions& options, ModelWeights& stored) {
  Decision decision = decide(options, subject(options.ranks, stored));
  if (!options.ranks.group) return decision;
  Group& group = *options.ranks.group;
  for (ModelOptions again = options;;) {
    run_on_all(group, [] {});
    std::vector<char> on_gpu(group.size());
    group.all_gather_values(static_cast<char>(decision.parts.gpu.has_value()), std::span(on_gpu));
    std::vector<bool> found(on_gpu.begin(), on_gpu.end());
    if (found == on_gpu_) return decision;
    if (!why_not_of_two_kinds(options).empty()) found.assign(found.size(), false);
    on_gpu_ = found;
    if (!on_gpu_[group.rank()]) again.device = DeviceChoice::kCpu;
    decision = decide(again, subject(options.ranks, stored));
  }
}

// The ranks of a host have equal shares of its memory.
Subject LoadedModel::subject(const Ranks& ranks, ModelWeights& stored) const {
  Subject subject{config_,  stored, topology_,
                  kernels_, home_,  machine_info().memory_bytes / ranks.on_host.n_of_host};
  if (asked_workers_) subject.on_workers = asked_workers_->experts_of_layers(config_);
  if (ranks.group)
    subject.rank = {ranks.group->rank(), ranks.group->size(), ranks.on_host.n_of_host};
  subject.host_of_rank = host_of_rank_;
  subject.on_gpu = on_gpu_;
  return subject;
}

// Drafts with the MTP layers if there are some that are small beside the model, displace nothing,
// and have their experts on all workers.
void LoadedModel::add_mtp(const ModelOptions& options, const WeightStore& store,
                          ModelWeights& stored, Decision& decision) {
  if (!why_no_mtp(options.directory, store, config_).empty() ||
      mtp_share(config_) > options.largest_mtp_share)
    return;
  const std::string why_not =
      asked_workers_ ? asked_workers_->why_no_mtp(config_.n_layers + config_.n_mtp_layers) : "";
  if (!why_not.empty()) options.note("drafts are looked up in the text: " + why_not);
  Group* const group = options.ranks.group;
  if (group ? least_on_all(*group, why_not.empty()) == 0 : !why_not.empty()) return;
  const ModelConfig without = config_;
  config_.n_used_mtp_layers = config_.n_mtp_layers;
  ModelWeights all;
  std::optional<Decision> with;
  try {
    all = stored_with_mtp(store, topology_.n_cores(), config_);
    with = decide_with_mtp(options, subject(options.ranks, all), decision);
    if (!with)
      options.note("the layer for multi-token prediction is not used: memory is too small for it");
  } catch (const Error& why) {
    options.warn(fmt::format("the layer for multi-token prediction is not used: {}", why.what()));
  }
  if (group && least_on_all(*group, with.has_value()) == 0) with.reset();
  if (!with) {
    config_ = without;
    return;
  }
  stored = std::move(all);
  decision = *std::move(with);
  drafting_.source = Drafting::Source::kMtp;
}

void LoadedModel::load_on_gpu(const Source& source, const Decision& decision) {
  const auto& [options, checkpoint, progress] = source;
  const ExecutedParts& parts = decision.parts;
  const Group* const group = options.ranks.group;
  GpuModelOptions gpu =
      gpu_options(options, decision,
                  hosts_of_stage(host_of_rank_, decision.parts.grid, group ? group->rank() : 0));
  const bool exchanges = gpu.exchanges_on_host, shares = exchanges || !all_on_gpu(*parts.gpu);
  gpu.n_threads = topology_.n_cores();
  gpu.progress = progress;
  gpu_ = load_gpu_model(*checkpoint.store, checkpoint.stored, config_, gpu, *parts.gpu);
  report_ = gpu_->report();
  std::unique_ptr<OutputThread> moving = thread_for_moves(options);
  if (shares) {
    const LoadReport host = load_host_weights(source, parts.experts);
    report_.seconds += host.seconds;
    report_.bytes += host.bytes;
    start_team(options, exchanges ? gpu.served_tokens() : gpu.expert_tokens());
    if (options.record_timeline) timeline_ = std::make_unique<Timeline>();
  }
  if (decision.beside_cpus) {
    join_beside_cpus(options, decision);
  } else {
    ExpertPool* const workers = start_workers(options, decision);
    if (shares) gpu_->add_cpu_experts(*experts_, workers, timeline_.get());
    if (options.ranks.group) set_owners(options, decision);
    if (every_rank_has_links(options))
      start_replica(options, gpu_->experts());
    else if (options.ranks.group)
      join_ranks(options);
  }
  simulate_routing(options, decision);
  if (moving) start_mover(source, decision, std::move(moving));
  if (options.record_routing) gpu_->record_routing();  // all ids, also those of other ranks
  model_ = std::make_unique<StepRunner>(
      ModelParts{config_, gpu_->weights(), gpu_->device(), gpu_->ops(),
                 replica_experts_ ? static_cast<ExpertPool&>(*replica_experts_) : gpu_->experts()},
      decision.limits, options.attention, place_in_grid(options, parts));
  const StageLayers stage = decision.stage();
  const int64_t n_tokens =
      decision.beside_cpus ? kv_tokens_of_all(options, parts.kv_tokens) : parts.kv_tokens;
  const int64_t bytes = KvCache::bytes_for(config_, n_tokens, parts.kv_type, stage);
  cache_ = std::make_unique<KvCache>(config_, n_tokens, parts.kv_type,
                                     gpu_->device().allocate(bytes), stage);
  if (!decision.beside_cpus) add_host_pages(options);  // all ranks have as many
}

// Makes the calls that load_on_cpu() makes on other ranks.
void LoadedModel::join_beside_cpus(const ModelOptions& options, const Decision& decision) {
  groups_ = GridGroups(*options.ranks.group, decision.parts.grid, decision.parts.by_replicas);
  gpu_->use(groups_.of_backbone(decision.parts.grid, decision.first_routes));
  set_owners(options, decision);
  if (exchanges_rows(options, decision.parts.grid))
    exchanged_experts_ = exchanged_experts(options, decision, gpu_->served_experts(*experts_));
  if (experts_) gpu_->add_cpu_experts(*experts_, exchanged_experts_.get(), nullptr);
}

// The tokens of the KV cache on every rank; this one has memory for n_tokens.
int64_t LoadedModel::kv_tokens_of_all(const ModelOptions& options, int64_t n_tokens) const {
  if (options.max_kv_tokens <= context_) return context_;
  if (options.ranks.group) n_tokens = least_on_all(*options.ranks.group, n_tokens);
  return std::clamp(n_tokens, context_, options.max_kv_tokens);
}

void LoadedModel::join_ranks(const ModelOptions& options) {
  Group& group = *options.ranks.group;
  gpu_->join(group, *owners_, [&group] { end_ranks(group); });
  const std::string ways = gpu_->ways_of_rows();
  if (!ways.empty()) options.note("rows of experts: " + ways);
  const auto patience = std::chrono::duration_cast<std::chrono::seconds>(
      rank_patience(options.workers, kGpuPatience));
  rank_watch_ = std::make_unique<ProgressWatch>([this] { return gpu_->progress(); }, patience,
                                                [&group] { end_ranks(group); });
}

// Uses the memory that is free after everything else is allocated.
void LoadedModel::add_host_pages(const ModelOptions& options) {
  const Ranks& ranks = options.ranks;
  int64_t n = host_pages_for({.gpu_pages = cache_->n_pages(),
                              .most_pages = options.max_kv_tokens / kPageSize,
                              .page_bytes = cache_->page_bytes(),
                              .memory_bytes = available_memory_bytes() / ranks.on_host.n_of_host});
  if (ranks.group) n = least_on_all(*ranks.group, n);
  if (n == 0) return;
  host_pages_ = std::make_unique<HostPages>(gpu_->device(), *cache_, static_cast<int>(n));
  model_->use(host_pages_.get());
}

void LoadedModel::load_on_cpu(const Source& source, const Decision& decision) {
  const ModelOptions& options = source.options;
  std::string why_not;
  if (options.dense_products != DenseProducts::kTandem)  // an error is reported before loading
    provider_ = open_onednn(onednn_names(), topology_.n_cores(), why_not);
  require(provider_ || options.dense_products != DenseProducts::kOneDnn,
          "--dense-products onednn: {}: leave it out, or install it", why_not);
  report_ = load_host_weights(source, decision.parts.experts);
  std::unique_ptr<OutputThread> moving = thread_for_moves(options);
  const int max_tokens = decision.limits.max_tokens;
  const BackboneGrid grid = decision.parts.grid;
  start_team(options,
             exchanges_rows(options, grid) ? grid.of_stage().most_tokens(max_tokens) : max_tokens);
  device_ = std::make_unique<CpuDevice>(*team_);
  ops_ = std::make_unique<CpuOps>(kernels_, config_, decision.limits.max_tokens, *team_);
  if (options.dense_products != DenseProducts::kTandem) {
    dense_products_ = provider_ ? choose_products({config_, weights_, kernels_, *ops_, *team_,
                                                   decision.limits.max_tokens},
                                                  *provider_, options.dense_products)
                                : fmt::format("tandem's kernels: {}", why_not);
    options.note("dense products: " + dense_products_);
  }
  ExpertPool& experts = options.ranks.group ? start_ranks(options, decision)
                        : asked_workers_    ? *start_workers(options, decision)
                                            : *experts_;
  simulate_routing(options, decision);
  if (moving) start_mover(source, decision, std::move(moving));
  if (options.record_routing) {
    recorder_ = std::make_unique<RoutingRecorder>(config_);
    experts.observe(recorder_.get());
  }
  model_ = std::make_unique<StepRunner>(ModelParts{config_, weights_, *device_, *ops_, experts},
                                        decision.limits, options.attention,
                                        place_in_grid(options, decision.parts));
  const DType type = decision.parts.kv_type;
  const StageLayers stage = decision.stage();
  const int64_t n_tokens = kv_tokens_of_all(options, fitting_kv_tokens(options, config_, type));
  cache_ = std::make_unique<KvCache>(
      config_, n_tokens, type, Buffer(KvCache::bytes_for(config_, n_tokens, type, stage)), stage);
}

// Called once the ranks of all experts are known.
void LoadedModel::simulate_routing(const ModelOptions& options, const Decision& decision) {
  SharingRanks ranks;
  if (owners_)
    ranks = {decision.parts.grid.n_of_stage(), [this](int layer, int expert) {
               return std::span<const int32_t>(owners_->ranks(layer, expert));
             }};
  config_.router.simulated = simulated_choices(options.simulated_routing, config_, config_, ranks);
}

ExpertPool& LoadedModel::start_ranks(const ModelOptions& options, const Decision& decision) {
  Group& group = *options.ranks.group;
  const BackboneGrid grid = decision.parts.grid;
  groups_ = GridGroups(group, grid, decision.parts.by_replicas);
  ops_->use(groups_.of_backbone(grid, decision.first_routes));
  set_owners(options, decision);
  if (exchanges_rows(options, grid)) {
    exchanged_experts_ = exchanged_experts(options, decision, *experts_);
    if (options.record_timeline) {
      timeline_ = std::make_unique<Timeline>();
      exchanged_experts_->record(*timeline_);
    }
    return *exchanged_experts_;
  }
  ExpertPool* const workers = start_workers(options, decision);
  if (every_rank_has_links(options)) {
    start_replica(options, *workers);
    return *replica_experts_;
  }
  rank_experts_ = std::make_unique<RankExperts>(RankExperts::Parts{
      .owners = *owners_,
      .rank = grid.in_stage(group.rank()),
      .mine = *experts_,
      .workers = workers,
      .micro_batches = asked_workers_ ? exchanged_micro_batches(options, decision.parts) : 1});
  return *rank_experts_;
}

void LoadedModel::start_replica(const ModelOptions& options, ExpertPool& mine) {
  meetings_ = options.ranks.group->split(0);
  replica_experts_ = std::make_unique<ReplicaExperts>(*meetings_, mine);
}

// Null where this process has no links to workers. All ranks call it. The GPUs of ranks that divide
// a backbone have whole steps, because only the first would let micro-batches take turns.
ExpertPool* LoadedModel::start_workers(const ModelOptions& options, const Decision& decision) {
  if (!asked_workers_) return nullptr;
  Group* const group = options.ranks.group;
  const bool takes_turns = !gpu_ || !group || group->size() == 1 || every_rank_has_links(options);
  const auto start = [&] {
    if (group && group->rank() > 0 && !every_rank_has_links(options)) return;
    worker_experts_ = worker_experts(
        {.options = options,
         .kernels = kernels_,
         .config = config_,
         .local = *experts_,
         .team = *team_,
         .max_tokens = decision.limits.max_tokens,
         .micro_batches = takes_turns ? exchanged_micro_batches(options, decision.parts) : 1},
        *asked_workers_);
    worker_list_ = watch_workers(*asked_workers_, *worker_experts_);
  };
  group ? run_on_all(*group, start) : start();
  return worker_experts_.get();
}

void LoadedModel::start_mover(const Source& source, const Decision& decision,
                              std::unique_ptr<OutputThread> thread) {
  const int n_threads = std::max(1, topology_.n_cores() / 16);
  const auto checkpoint = std::make_shared<OpenCheckpoint>(std::move(source.checkpoint));
  const ExpertsLayout& experts = decision.parts.experts;
  const auto spare = [&](int n) {
    return std::make_unique<SpareExperts>(checkpoint, config_, PackedLayout{kernels_, experts},
                                          topology_, weights_, n);
  };
  const Group* const group = source.options.ranks.group;
  const int rank = group ? decision.parts.grid.in_stage(group->rank()) : 0;
  if (gpu_) {
    GpuMoverParts parts = {.checkpoint = checkpoint,
                           .thread = std::move(thread),
                           .n_threads = n_threads,
                           .layers = decision.stage(),
                           .cpu_weights = &weights_,
                           .owners = owners_.get(),
                           .rank = rank};
    if (!group) parts.on_cpu = spare(kHotExpertsAtOnce);
    mover_ = gpu_->mover(std::move(parts));
    return;
  }
  const RankExpertMover::Parts parts = {.weights = weights_,
                                        .owners = *owners_,
                                        .rank = rank,
                                        .layers = decision.stage(),
                                        .n_threads = n_threads};
  mover_ = std::make_unique<RankExpertMover>(parts, spare(most_of_layer(experts, config_)),
                                             std::move(thread));
}

void LoadedModel::set_owners(const ModelOptions& options, const Decision& decision) {
  Group& group = *options.ranks.group;
  const BackboneGrid grid = decision.parts.grid;
  const int n_of_stage = grid.n_of_stage();
  const RankHosts hosts = rank_hosts(host_of_rank_, grid.stage_of(group.rank()) * n_of_stage);
  owners_ = std::make_unique<ExpertOwners>(owners_of(decision.parts.ranks_of_expert, config_,
                                                     n_of_stage, hosts, options.replica_choice));
}

// A GPU's experts take floats.
std::unique_ptr<ExchangedExperts> LoadedModel::exchanged_experts(const ModelOptions& options,
                                                                 const Decision& decision,
                                                                 ExpertPool& mine) {
  Group& group = *options.ranks.group;
  bool takes_bf16 = &mine == experts_.get();
  const std::vector<cpu::ActivationType> types = experts_->activations();
  for (int layer = 0; layer < config_.n_all_layers(); ++layer)
    if (config_.is_moe(layer))
      takes_bf16 = takes_bf16 && types[layer] == cpu::ActivationType::kBF16;
  takes_bf16 = least_on_all(group, takes_bf16) > 0;
  const BackboneGrid grid = decision.parts.grid;
  const HostLayout hosts = hosts_of_stage(host_of_rank_, grid, group.rank());
  const bool simulates_hosts = !options.simulated_hosts.empty();
  if (options.simulated_delay.count() > 0 || options.simulated_rate > 0 || simulates_hosts)
    delayed_ =
        make_delayed(groups_.stage(),
                     {.delay = options.simulated_delay,
                      .bytes_per_second = options.simulated_rate,
                      .host_of_rank = simulates_hosts ? hosts.host_of_rank() : std::vector<int>()});
  auto experts = std::make_unique<ExchangedExperts>(ExchangedParts{
      delayed_ ? *delayed_ : groups_.stage(), hosts, grid.of_stage(), *owners_, kernels_, config_,
      mine, decision.limits.max_tokens, row_formats(decision.rows, takes_bf16),
      exchange_mode(options.dispatch), exchanged_micro_batches(options, decision.parts)});
  options.note("rows of experts: " + experts->modes());
  return experts;
}

LoadReport LoadedModel::load_host_weights(const Source& source, const ExpertsLayout& experts) {
  const ModelOptions& options = source.options;
  const LoadPlan plan = {
      .layout = {kernels_, experts},
      .cache_directory = options.cache.empty() ? default_cache_directory() : options.cache,
      .cache_use = options.cache_use,
      .n_threads = topology_.n_cores(),
      .progress = source.progress,
      .write_progress = options.write_progress,
      .warn = options.warn};
  LoadedWeights loaded =
      load_weights(*source.checkpoint.store, source.checkpoint.stored, config_, plan, home_);
  weights_ = std::move(loaded.weights);
  if (!home_.is_bound())
    options.warn(
        "the experts' memory cannot be bound to all its NUMA nodes (no permission, as in a "
        "container without SYS_NICE, or too little memory on a node): expect lower speed");
  return loaded.report;
}

// Called after loading: threads created later would inherit this thread's CPU affinity.
void LoadedModel::start_team(const ModelOptions& options, int max_tokens) {
  team_ = std::make_unique<Team>(topology_);
  if (team_->n_unpinned() > 0)
    options.warn(fmt::format("{} of {} threads cannot be pinned to their cores: expect lower speed",
                             team_->n_unpinned(), team_->size()));
  experts_ = std::make_unique<CpuExperts>(kernels_, config_, weights_, max_tokens, *team_);
  if (gpu_)
    watch_ = std::make_unique<ProgressWatch>([this] { return team_->progress(); }, kTeamPatience,
                                             end_program);
}

Vocabulary vocabulary_of(const Tokenizer& tokenizer, int model_vocab) {
  Vocabulary vocabulary{.size = std::min(tokenizer.vocab_size(), model_vocab)};
  for (const int32_t id : tokenizer.holes())
    if (id < vocabulary.size) vocabulary.holes.push_back(id);
  return vocabulary;
}

std::string embedded_model() {
  std::string folder = program_file("models/tiny-r1");
  require(!folder.empty(),
          "the embedded model is missing (looked for {}): install the program with `make install`, "
          "or name a model directory",
          fmt::join(program_file_places("models/tiny-r1"), ", "));
  return folder;
}

}  // namespace tandem
