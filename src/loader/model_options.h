// What a user decides about a model that is to be loaded, as types.
#pragma once
#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/group.h"
#include "comm/heartbeat.h"
#include "comm/hosts.h"
#include "core/row_format.h"
#include "cpu_kernels/kernels.h"
#include "engine/step_channel.h"
#include "engine/step_runner.h"
#include "loader/weights/load_weights.h"
#include "model/weight_format.h"
#include "offload/ranks/expert_owners.h"
#include "offload/simulation/simulated_routing.h"
#include "transport/secret.h"
#include "transport/transport_choice.h"

namespace tandem {

enum class DeviceChoice { kAuto, kCpu, kCuda };  // kAuto: the GPU if it takes the model
const char* name_of(DeviceChoice device);        // "auto", "cpu", "cuda"

// What computes the dense products of a CPU. Only the kernels' bits do not depend on the batch.
// kFastest: for each shape what is measured to be faster at load.
enum class DenseProducts { kTandem, kOneDnn, kFastest };
const char* name_of(DenseProducts products);  // "tandem", "onednn", "fastest"

// What is drafted. kAuto: as many tokens as pay, by the layers for multi-token prediction where the
// checkpoint has some that are small beside the model and fit the memory, else by prompt lookup.
enum class DraftChoice { kOff, kAuto, kMtp, kLookup };
const char* name_of(DraftChoice draft);  // "off", "auto", "mtp", "lookup"
constexpr int kUsualDraftTokens = 4;

// How rows of tokens come to the ranks that have their experts (offload/ranks/expert_exchange.h).
// kAllReduce: every rank has all rows, and only sums travel; for one replica of the backbone.
// kAuto: that, or for several replicas what is measured to be faster, for prompts and for decode.
enum class ExpertDispatch { kAuto, kAllReduce, kGather, kAllToAll, kLowLatency };
// "auto", "all-reduce", "gather", "all-to-all", "low-latency"
const char* name_of(ExpertDispatch dispatch);

// The ranks that compute a model together: they divide its heads, columns and experts, and compute
// the same steps. All ranks are given the same options.
struct Ranks {
  Group* group = nullptr;        // null: this process alone
  StepChannel* steps = nullptr;  // null: the caller makes the same calls on all ranks
  PlaceOnHost on_host = {};
  Heartbeat* heartbeat = nullptr;  // null: lost ranks are noticed by the calls of steps alone
  bool follow() const { return steps && !steps->leads(); }  // whether rank 0 decides the steps
};

// Processes that compute routed experts for this one (offload/workers/worker_experts.h).
struct WorkerOptions {
  std::vector<std::string> addresses = {};  // HOST:PORT
  std::string file = {};                    // with the addresses instead (WorkerList); empty: none
  SecretOptions secret = {};
  TransportChoice transport = TransportChoice::kTcp;
  std::chrono::milliseconds deadline{500};  // a worker that was silent for so long is down
  // How long a step, and loading, wait for workers that are down.
  std::chrono::duration<double> patience{10};
  // WorkerListOptions; an empty resolver is the system's.
  std::function<std::vector<std::string>(const std::string&)> resolve = {};
  std::chrono::milliseconds list_period{1000};
  bool any() const { return !addresses.empty() || !file.empty(); }
};

// Ranks of which the first has workers: how long a step waits for workers at most, also where these
// or standbys get on.
inline std::chrono::duration<double> longest_wait(const WorkerOptions& workers) {
  return workers.patience + std::chrono::seconds(5);
}
// How long a rank waits for another one; `usual` is enough without workers.
inline std::chrono::duration<double> rank_patience(const WorkerOptions& workers,
                                                   std::chrono::duration<double> usual) {
  if (!workers.any()) return usual;
  return std::max<std::chrono::duration<double>>(usual,
                                                 longest_wait(workers) + std::chrono::seconds(5));
}

// Replicas that have links of their own to workers wait for each other at the end of a step only,
// for so long: a heartbeat tells that none is lost, and without one they wait for a shorter time.
constexpr std::chrono::duration<double> kLongestStep = std::chrono::hours(24);
constexpr std::chrono::duration<double> kLongestStepUnheard = std::chrono::seconds(120);

constexpr Patience kLoadPatience = {std::chrono::hours(2)};  // ranks wait for each other's loading

// Tokens of a sequence where none are asked for: as many as the model has, at most these.
constexpr int64_t kDefaultContext = 8192;
inline int64_t default_context(const ModelConfig& config) {
  return std::min<int64_t>(config.max_context, kDefaultContext);
}
constexpr int kStepTokens = 512;  // tokens of a prompt per step

struct ModelOptions {
  std::string directory;
  DeviceChoice device = DeviceChoice::kCpu;
  std::optional<cpu::Isa> isa = {};  // empty: default_isa()
  int n_threads = 0;                 // 0: one per core
  int64_t context = 0;  // tokens per sequence; 0: the model's own, at most kDefaultContext
  // Tokens of KV cache for all sequences: at least one context, and more as this fraction of the
  // free memory after loading allows, up to max_kv_tokens. With a GPU this is GPU memory; pages in
  // host memory hold the rest (host_pages_for()).
  double kv_fraction = 0;
  int64_t max_kv_tokens = 0;
  // Maximum tokens per step, at most those of a placement; nothing: its own, or kStepTokens.
  std::optional<int> step_tokens = {};
  int max_logits = 1;  // rows of logits per step, without those of drafts of one sequence
  DraftChoice draft = DraftChoice::kOff;
  int draft_tokens = 0;  // drafts of a sequence per step, at most kMaxDraftTokens; 0: the usual
  double largest_mtp_share = 0.25;  // kAuto uses MTP layers up to this mtp_share()
  AttentionForm attention = AttentionForm::kAuto;
  DenseProducts dense_products = DenseProducts::kTandem;
  std::optional<DType> kv = {};  // KV cache type on a GPU, BF16 or FP8; empty: as placed, or BF16
  bool fp8_activations = false;  // GPU products of many tokens
  // Format of the routed experts; empty: as placed, as stored, or the first of int8 and int4 that
  // fits the memory.
  std::optional<WeightFormat> experts = {};
  std::string placement = {};  // file that sets experts, context and steps instead
  std::string cache = {};      // folder of the packed cache; empty: default_cache_directory()
  CacheUse cache_use = CacheUse::kRead;
  Ranks ranks = {};
  WorkerOptions workers = {};
  int n_replicas = 0;  // of the backbone; 0: as placed, or one
  int tp = 0;          // ranks of a replica in a stage; 0: all that there are
  int n_stages = 0;    // of a pipeline; 0: as placed, or one
  // What the ranks of all replicas divide; nothing: as placed, or nothing.
  std::optional<SharedByReplicas> by_replicas = {};
  int ep = 0;  // ranks that divide the experts, which is all of a stage; 0: not said
  ExpertDispatch dispatch = ExpertDispatch::kAuto;
  // Formats of those rows; nothing: exact.
  std::optional<ExpertRows> rows = {};
  ReplicaChoice replica_choice = ReplicaChoice::kNearest;  // of an expert that several ranks have
  // Parts of a step where CPU ranks exchange rows; 0: as many as is measured to be faster.
  int micro_batches = 0;
  // Rows and sums arrive so much later, for benchmarks and tests on one host.
  std::chrono::duration<double> simulated_delay{0};
  double simulated_rate = 0;              // bytes/s of a rank to other hosts; 0: no limit
  std::vector<int> simulated_hosts = {};  // ranks on each; empty: hosts are those that there are
  SimulatedRouting simulated_routing = {};
  bool record_routing = false;
  bool count_experts = false;        // StepRunner::count_experts()
  bool identifies = false;           // LoadedModel::identity() is wanted
  bool moves_experts = false;        // StepRunner::load_experts(); takes memory
  bool record_timeline = false;      // of steps shared by GPU and CPU
  LoadProgress write_progress = {};  // of the packed cache
  // Called with one line: what the user should know, and what was decided.
  std::function<void(const std::string&)> warn = [](const std::string&) {};
  std::function<void(const std::string&)> note = [](const std::string&) {};
};

// The instruction set named by the environment variable TANDEM_ISA, or the best one here.
cpu::Isa default_isa();
// The instruction set of this name. Throws Error for an unknown one, and for one that this machine
// lacks, naming the available ones.
cpu::Isa isa_called(const std::string& name);

}  // namespace tandem
