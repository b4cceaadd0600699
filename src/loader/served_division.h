// Where the experts of a worker are kept: as many as fit on its GPU, where it is to use one, and
// the others in its memory.
#pragma once
#include "loader/loaded_experts.h"
#include "model/experts_layout.h"
#include "offload/parts/executed_parts.h"

namespace tandem {

struct ServedDivision {
  // [n_experts] the same ones of every layer; empty: none is on a GPU.
  std::vector<bool> on_gpu;
  GpuParts gpu;  // of on_gpu, where there are any
  ExpertsLayout in_memory;
  bool has_gpu() const { return !on_gpu.empty(); }
};

// The model, and which experts of every layer the worker has.
struct ServedSubject {
  const ModelConfig& config;
  ModelWeights& stored;  // stored_weights()
  const CpuWeights& home;
  const std::vector<bool>& experts;  // [n_experts]
};

// Throws Error for too little memory, and for a GPU that cannot be used: with DeviceChoice::kAuto
// everything is in memory then, after a warning.
ServedDivision divide_served(const LoadedExpertsOptions& options, const ServedSubject& subject);

}  // namespace tandem
