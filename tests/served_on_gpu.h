// Expert workers with a GPU of limited memory, for tests.
#pragma once
#include <string>

#include "loader/gpu_experts.h"
#include "loader/loaded_experts.h"
#include "model/checkpoint.h"
#include "model/parameters.h"
#include "tests/worker_threads.h"

namespace tandem::test {

inline LoadedExpertsOptions served_on_gpu(const std::string& directory,
                                          const std::string& experts) {
  LoadedExpertsOptions options = served(directory, experts);
  options.device = DeviceChoice::kCuda;
  return options;
}

// The GPU memory with room for exactly n of the worker's experts of every layer. GpuMemory counts
// experts by the largest one.
inline int64_t gpu_bytes_for(const LoadedExpertsOptions& options, int n) {
  ModelConfig config = ModelConfig::from_directory(options.directory);
  if (options.draft == DraftChoice::kMtp) config.n_used_mtp_layers = config.n_mtp_layers;
  const WeightStore store(options.directory);
  ModelWeights stored = stored_weights(store, config);
  const GpuMemory memory = gpu_expert_memory(stored, config, options.max_rows);
  const int n_layers = moe_layers(config, 0, config.n_all_layers() - 1);
  const GpuParts one = evenly_on_gpu(config, 1);
  return memory.weight_bytes(one) + memory.other_bytes(one, 0, 0) +
         (int64_t{n} * n_layers - 1) * memory.expert_bytes;
}

}  // namespace tandem::test
