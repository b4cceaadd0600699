// The device of every part of a model: decided by plan(), editable by a user (placement_json.h),
// followed by a loader. Data, and checks that a placement is complete and fits.
#pragma once
#include <algorithm>
#include <compare>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/machine.h"
#include "core/row_format.h"
#include "model/config.h"
#include "model/weight_format.h"

namespace tandem {

// A GPU, or the CPUs of a host with their memory.
struct DeviceId {
  int host = 0;
  int gpu = -1;  // index within the host; -1: its CPUs
  bool is_cpu() const { return gpu < 0; }
  // clang-tidy 14 takes the defaulted comparison's 0 for a null pointer.
  auto operator<=>(const DeviceId&) const = default;  // NOLINT(modernize-use-nullptr)
};
std::string device_name(DeviceId device);                     // "host0.cpu", "host3.gpu5"
std::string device_names(std::span<const DeviceId> devices);  // "host0.cpu, host3.gpu5"

using NumaColumns = std::vector<std::vector<int>>;  // [kinds of hosts][NUMA nodes]

// Experts of a layer with the same owners.
struct ExpertGroup {
  std::vector<int> experts;  // ascending
  WeightFormat format;
  std::vector<DeviceId> owners;  // each holds every expert of the group whole; several are replicas
  bool sliced = false;           // the owners hold equal slices instead (tensor parallel)

  bool is_on(DeviceId device) const {
    return std::find(owners.begin(), owners.end(), device) != owners.end();
  }
};

// MoE layers first .. last with identical expert placement. Dense layers in the range have no
// experts.
struct LayerExperts {
  int first, last;
  std::vector<ExpertGroup> groups;
};

// Layers first .. last of the backbone. `devices` form data-parallel replicas of `tp` consecutive
// devices, which share each layer (tensor parallel). Several stages form a pipeline.
struct Stage {
  int first, last;
  std::vector<DeviceId> devices;
  int tp = 1;
  int dp() const { return static_cast<int>(devices.size()) / tp; }
};

struct Placement {
  std::string model, machine;  // names, for display only
  WeightFormat backbone;       // attention, dense layers, shared experts
  std::vector<Stage> stages;
  bool embedding_on_cpu = false;  // else on the devices of the first stage
  bool head_on_cpu = false;       // else on the devices of the last stage
  // true: each replica holds the whole head (DP head); false: all devices of the stage share it.
  bool head_replicated = true;
  // true: each replica holds whole dense layers; false: all devices of the stage share them.
  bool dense_replicated = true;
  int64_t kv_tokens = 0;         // KV cache tokens in each replica
  DType kv_type = DType::kBF16;  // BF16, or FP8 where the backbone is on GPUs
  std::vector<LayerExperts> layers;
  // Columns of every CPU expert's intermediate dimension on each NUMA node of a host, for each kind
  // of hosts. Empty, in all or for a kind: not sliced.
  NumaColumns numa_columns;
  std::vector<int> hosts_of_kinds;  // how many each kind has; empty: there is one kind
  // Every device has memory for experts that come to it while a server answers.
  bool room_to_move = false;
  ExpertRows expert_rows = ExpertRows::kExact;  // as they travel between ranks
  int prefill_chunk_tokens = 512;
  // Chunks of at least this many tokens stream CPU experts to the backbone's GPU; 0: never.
  int stream_from_tokens = 0;
  // 2: experts of one micro-batch are computed during the attention of the other.
  int micro_batches = 1;
  // Minimum sequences per replica in a decode step for two micro-batches.
  int micro_batches_from_sequences = 2;
};

struct DeviceMemory {
  DeviceId device;
  int64_t weights_bytes = 0, kv_bytes = 0, activation_bytes = 0, reserve_bytes = 0;
  int64_t spare_bytes = 0;  // for experts that move
  int64_t capacity_bytes = 0;
  int64_t free_bytes() const {
    return capacity_bytes - weights_bytes - kv_bytes - activation_bytes - reserve_bytes -
           spare_bytes;
  }
};

// Memory of every device of the machine, in order of hosts, each host's CPU first. The placement's
// devices must exist.
std::vector<DeviceMemory> memory_by_device(const ModelConfig& config, const Machine& machine,
                                           const Placement& placement);
// Bytes reserved for the operating system or the driver.
int64_t reserved_bytes(int64_t capacity, bool cpu);

// Throws Error naming layer and expert or the device: an expert with no owner or in two groups, a
// device that does not exist, layers without a stage, unsupported splits, memory exceeded.
void check_placement(const ModelConfig& config, const Machine& machine, const Placement& placement);
// The same with the memory of the device's host alone, where the machine's other hosts are not
// known to be like it.
void check_placement_of_host(const ModelConfig& config, const Machine& machine,
                             const Placement& placement, int host);

// Whether a part of the backbone is on the host's CPU or GPUs.
bool has_backbone(const Placement& placement, int host);
// The workers: devices with experts on hosts without a part of the backbone, ascending.
std::vector<DeviceId> worker_devices(const Placement& placement);
std::vector<int> worker_hosts(const Placement& placement);  // their hosts, ascending
// The format of experts on a worker's GPU: as stored, or BF16 where they are packed.
WeightFormat worker_gpu_format(const ModelConfig& config);

// Whether rows of activations travel between ranks to their experts: replicas of the backbone have
// tokens of their own. Rows to workers travel in another way, always exact.
bool rows_travel(const Placement& placement);

// Placement::hosts_of_kinds of this machine.
std::vector<int> hosts_of_kinds(const Machine& machine);
// Placement::numa_columns of a host. Throws Error where the placement has columns for several kinds
// of hosts and does not say which host is of which.
std::vector<int> columns_of_host(const Placement& placement, int host);

// The entry of a layer; null if it has no experts.
const LayerExperts* experts_of_layer(const Placement& placement, int layer);

constexpr int kStreamedExperts = 4;  // streamed to a GPU at a time

// Rules that bound any placement, as formulas of the model's shapes and one device's rates.
// Replicas of the backbone from which each expert's batch is at least one replica's: E / top_k.
double least_dp_for_compute_bound(const ModelConfig& config);
// Expert-parallel ranks beyond this number, routed plus shared experts, have no expert of their own
// to read; they help only where an expert's arithmetic takes longer than reading it.
int most_useful_ep(const ModelConfig& config);
// Lower bound of a layer's time under any expert parallelism: reading one expert at a byte per
// weight.
double one_expert_read_seconds(const ModelConfig& config, double read_bytes_per_second);
// The mean number of a step's tokens that an expert gets.
double tokens_per_expert(const ModelConfig& config, double tokens);
// Tokens per expert at which its arithmetic takes as long as reading it.
double ridge_tokens_per_expert(double ops_per_second, double read_bytes_per_second,
                               double bytes_per_weight);

constexpr int kSplitMultiple = 128;  // columns per scale block and per kernel tile
// Why `width` (of the part called `what`) cannot be split `ways`; empty if it can.
std::optional<std::string> split_refusal(const char* what, int width, int ways);
// The first refused tensor-parallel split of a model; empty if there is none.
std::optional<std::string> tensor_parallel_refusal(const ModelConfig& config, int ways);

}  // namespace tandem
