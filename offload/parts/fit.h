// The parts of a model on this machine when no placement file decides. Pure. Unlike plan() it needs
// no measured rates: a GPU reads and multiplies faster than the CPU beside it, so it takes whatever
// fits, and memory alone decides. The caller counts bytes exactly, as it will allocate them.
#pragma once
#include <functional>
#include <limits>
#include <string>

#include "offload/parts/executed_parts.h"

namespace tandem {

struct HostMemory {
  int64_t capacity_bytes;
  // Bytes of everything kept in host memory with this layout.
  std::function<int64_t(const ExpertsLayout&)> bytes;
};

struct GpuMemory {
  std::string name;
  int64_t free_bytes;
  int64_t expert_bytes;  // of the largest routed expert
  bool streams;          // false: its rates mean nothing, as on an emulated GPU
  std::function<int64_t(const GpuParts&)> weight_bytes;
  // Bytes of everything beside weights with this many tokens of KV cache, in sequences of at most
  // `context` tokens.
  std::function<int64_t(const GpuParts&, int64_t context, int64_t kv_tokens)> other_bytes;

  // Bytes left; negative if it does not fit.
  int64_t left(const GpuParts& parts, int64_t context, int64_t kv_tokens) const {
    return free_bytes - weight_bytes(parts) - other_bytes(parts, context, kv_tokens);
  }
};

struct FitRequest {
  const ModelConfig& config;
  int64_t context;  // tokens per sequence
  // KV cache tokens for all sequences: at least one context, and more as this fraction of the
  // remaining GPU memory allows, up to max_kv_tokens.
  double kv_fraction;
  int64_t max_kv_tokens;
  DType kv_type;
  std::optional<WeightFormat> experts;  // empty: as stored, or the first of int8, int4 that fits
  std::vector<std::vector<bool>> on_other_ranks = {};         // GpuParts::on_other_ranks
  int64_t most_on_gpu = std::numeric_limits<int64_t>::max();  // experts, of all layers
};

struct GpuShare {
  GpuParts parts;
  int64_t kv_tokens;
};

// The whole model, or else the backbone, a KV cache and as many experts as fit, up to the most that
// are asked for. Throws Error where the backbone does not fit (require_fits()).
GpuShare fit_gpu(const FitRequest& request, const GpuMemory& gpu);

// The experts that are not `elsewhere`, in the requested format. Throws Error when they do not fit:
// the message states the GB needed and available.
ExpertsLayout fit_host(const FitRequest& request, const HostMemory& host,
                       const Elsewhere& elsewhere);

// Throws Error if `parts` with one sequence do not fit: the message names a --ctx that would.
void require_fits(const FitRequest& request, const GpuMemory& gpu, const GpuParts& parts);

// KV cache tokens that `fraction` of the memory left beside `parts` and one sequence allows.
int64_t fitting_kv_tokens(const FitRequest& request, const GpuMemory& gpu, const GpuParts& parts,
                          double fraction);

}  // namespace tandem
