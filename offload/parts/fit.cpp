#include "offload/parts/fit.h"

#include <algorithm>

#include "core/check.h"
#include "core/rounding.h"
#include "model/kv_layout.h"

namespace tandem {

GpuShare fit_gpu(const FitRequest& r, const GpuMemory& gpu) {
  constexpr int64_t kAll = int64_t{1} << 40;
  GpuParts parts = evenly_on_gpu(r.config, kAll, r.on_other_ranks);
  if (gpu.left(parts, r.context, r.context) >= 0)
    return {parts, fitting_kv_tokens(r, gpu, parts, r.kv_fraction)};
  // Counts with one expert first, to include the memory that experts need besides weights.
  parts = evenly_on_gpu(r.config, 1, r.on_other_ranks);
  parts.stream_from_tokens = gpu.streams ? kMeasuredCrossover : 0;
  parts.embedding_on_cpu = gpu.left(parts, r.context, r.context) < 0;
  // Half of the memory for sequences, half for experts, unless more cache is requested.
  const double fraction = r.kv_fraction < 1 ? r.kv_fraction / 2 : 1;
  const int64_t kv_tokens = fitting_kv_tokens(r, gpu, parts, fraction);
  const int64_t left = gpu.left(parts, r.context, kv_tokens);
  const int64_t n_fitting = left < 0 ? 0 : 1 + left / gpu.expert_bytes;
  parts.experts =
      evenly_on_gpu(r.config, std::min(n_fitting, r.most_on_gpu), r.on_other_ranks).experts;
  require_fits(r, gpu, parts);
  return {parts, kv_tokens};
}

ExpertsLayout fit_host(const FitRequest& r, const HostMemory& host, const Elsewhere& elsewhere) {
  const auto layout = [&](std::optional<WeightFormat> format) {
    ExpertsLayout experts(format);
    experts.keep_elsewhere(elsewhere);
    return experts;
  };
  // INT4 with the checkpoint's groups is the stored format; other tensors may be of any type.
  const bool as_stored =
      r.experts && r.experts->dtype == DType::kI4 && r.experts->group == r.config.expert_group;
  ExpertsLayout experts = layout(as_stored ? std::nullopt : r.experts);
  int64_t needed = host.bytes(experts);
  for (const char* narrower : {"int8", "int4"}) {
    if (r.experts || needed <= host.capacity_bytes) break;
    experts = layout(weight_format(narrower));
    needed = host.bytes(experts);
  }
  require(needed <= host.capacity_bytes,
          "the model needs {:.1f} GB of memory with its KV cache and this machine has {:.1f} GB: "
          "use a smaller model, a smaller --ctx or --experts int4",
          needed * 1e-9, host.capacity_bytes * 1e-9);
  return experts;
}

void require_fits(const FitRequest& r, const GpuMemory& gpu, const GpuParts& parts) {
  const int64_t left = gpu.left(parts, r.context, r.context);
  if (left >= 0) return;
  const double free = gpu.free_bytes * 1e-9, needed = free - left * 1e-9;
  const double weights = gpu.weight_bytes(parts) * 1e-9;
  require(
      gpu.left(parts, kPageSize, kPageSize) >= 0,
      "{} has {:.2f} GB free and {:.2f} GB are needed, {:.2f} GB of them weights, which do not fit "
      "with any --ctx: use a smaller model, a placement with fewer experts on the GPU, or --device "
      "cpu",
      gpu.name, free, needed, weights);
  const int64_t too_many = least_where<int64_t>(2, r.context / kPageSize + 1, [&](int64_t pages) {
    return gpu.left(parts, pages * kPageSize, pages * kPageSize) < 0;
  });
  fail(
      "{} has {:.2f} GB free and {:.2f} GB are needed, {:.2f} GB of them weights, the rest KV "
      "cache and scratch: --ctx {} would fit",
      gpu.name, free, needed, weights, (too_many - 1) * kPageSize);
}

int64_t fitting_kv_tokens(const FitRequest& r, const GpuMemory& gpu, const GpuParts& parts,
                          double fraction) {
  const int64_t page = kPageSize * kv_bytes_per_token(r.config, r.kv_type);
  const auto left = static_cast<double>(gpu.left(parts, r.context, r.context));
  const int64_t pages = static_cast<int64_t>(fraction * std::max(0.0, left)) / page;
  return std::min(r.context + pages * kPageSize, std::max(r.context, r.max_kv_tokens));
}

}  // namespace tandem
