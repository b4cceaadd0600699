// Where every part of a model lives: what plan() decides, a person may edit (placement_json.h) and
// a loader obeys. Data, and the checks that it is whole and fits.
#pragma once
#include <compare>
#include <string>
#include <vector>

#include "core/machine.h"
#include "model/config.h"
#include "ops/weight_format.h"

namespace tandem {

// A GPU, or the CPUs of a host.
struct DeviceId {
  int host = 0;
  int gpu = -1;  // of the host; -1: its CPUs and their memory
  bool is_cpu() const { return gpu < 0; }
  // clang-tidy 14 takes the comparison's own 0 for a null pointer.
  auto operator<=>(const DeviceId&) const = default;  // NOLINT(modernize-use-nullptr)
};
std::string device_name(DeviceId device);  // "host0.cpu", "host3.gpu5"

// Some experts of a layer with the same home.
struct ExpertGroup {
  std::vector<int> experts;  // ascending
  WeightFormat format;
  std::vector<DeviceId> owners;  // each holds all of every expert: more than one are replicas
  bool sliced = false;           // the owners hold equal slices instead (tensor parallel)
};

// MoE layers first .. last, whose experts live alike. Dense layers between them have none.
struct LayerExperts {
  int first, last;
  std::vector<ExpertGroup> groups;
};

// Layers first .. last of the backbone: devices in replicas (data parallel) of `tp` neighbours that
// share each layer (tensor parallel). More than one stage is a pipeline.
struct Stage {
  int first, last;
  std::vector<DeviceId> devices;
  int tp = 1;
  int dp() const { return static_cast<int>(devices.size()) / tp; }
};

struct Placement {
  std::string model, machine;  // names, for people
  WeightFormat backbone;       // attention, dense layers, shared experts
  std::vector<Stage> stages;
  bool embedding_on_cpu = false;  // else on the devices of the first stage
  bool head_on_cpu = false;       // else on those of the last
  bool head_replicated = true;    // each replica has all of it (DP head), else all devices share it
  int64_t kv_tokens = 0;          // of KV cache in each replica, where attention is computed
  DType kv_type = DType::kBF16;   // or, where those are GPUs, FP8
  std::vector<LayerExperts> layers;
  std::vector<int> numa_columns;  // of every CPU expert's intermediate size, a NUMA node; empty: -
  int prefill_chunk_tokens = 512;
  // Chunks from so many tokens on bring the experts of CPUs to the backbone's GPU; 0: never.
  int stream_from_tokens = 0;
  int micro_batches = 1;  // 2: one half's experts are computed under the other's attention,
  int micro_batches_from_sequences = 2;  // in a replica's steps of so many and more
};

struct DeviceMemory {
  DeviceId device;
  int64_t weights_bytes = 0, kv_bytes = 0, activation_bytes = 0, reserve_bytes = 0;
  int64_t capacity_bytes = 0;
  int64_t free_bytes() const {
    return capacity_bytes - weights_bytes - kv_bytes - activation_bytes - reserve_bytes;
  }
};

// Of every device of the machine, hosts in order, each its CPU first. The placement's devices
// exist.
std::vector<DeviceMemory> memory_by_device(const ModelConfig& config, const Machine& machine,
                                           const Placement& placement);
// What a device keeps for the operating system or the driver.
int64_t reserved_bytes(int64_t capacity, bool cpu);

// Throws Error naming layer and expert or the device: an expert nobody or two groups own, a device
// that does not exist, layers without a stage, splits that are refused, memory exceeded.
void check_placement(const ModelConfig& config, const Machine& machine, const Placement& placement);

// The entry for a layer; null: no experts.
const LayerExperts* experts_of_layer(const Placement& placement, int layer);

constexpr int kStreamedExperts = 4;  // in flight to a GPU at a time

}  // namespace tandem
