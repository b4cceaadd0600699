// What of a checkpoint a GPU has: counted before anything is loaded, then reserved and uploaded.
#pragma once
#include <optional>
#include <vector>

#include "io/load_jobs.h"
#include "offload/parts/executed_parts.h"
#include "ops/cuda_weights.h"

namespace tandem {

// Where a tensor is stored for the GPU: in its own memory, in host memory (the embedding), or not
// at all.
enum class Home { kGpu, kHost, kNowhere };

struct GpuSelection {
  ModelWeights& stored;  // stored_weights()
  const ModelConfig& config;
  const GpuParts& parts;
  std::optional<BackboneShare> share = {};  // what of the backbone; nothing: all of it
  bool only_experts = false;                // none of the backbone
};

// Weights of which nothing is loaded yet: what of the backbone and of every expert will be here.
ModelWeights weights_of_rank(const std::optional<BackboneShare>& share, const GpuParts& parts);

int64_t weight_bytes(const GpuSelection& selection, Home where);

// Reserves memory for every tensor of `on_gpu`, which weights_of_rank() has given. The jobs, which
// any threads may run, upload pieces of tensors; the memories outlive them.
std::vector<LoadJob> upload_jobs(const GpuSelection& selection, ModelWeights& on_gpu,
                                 CudaWeights& gpu, CudaWeights& host);

}  // namespace tandem
