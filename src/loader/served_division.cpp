#include "loader/served_division.h"

#include <algorithm>

#include "core/machine_info.h"
#include "core/memory.h"
#include "loader/gpu_experts.h"
#include "loader/weights/pack_weights.h"
#include "model/parameters.h"
#include "offload/parts/fit.h"

namespace tandem {
namespace {

// Everything but the experts that the worker serves.
Elsewhere not_served(const ServedSubject& subject) {
  Elsewhere elsewhere{.experts = {}, .backbone = true};
  elsewhere.experts.resize(subject.config.n_all_layers());
  for (int layer = 0; layer < subject.config.n_all_layers(); ++layer) {
    if (!subject.config.is_moe(layer)) continue;
    elsewhere.experts[layer] = subject.experts;
    elsewhere.experts[layer].flip();
  }
  return elsewhere;
}

// Experts alone: there are no sequences.
FitRequest fit_request(const LoadedExpertsOptions& options, const ServedSubject& subject) {
  return {.config = subject.config,
          .context = 0,
          .kv_fraction = 0,
          .max_kv_tokens = 0,
          .kv_type = DType::kBF16,
          .experts = options.format,
          .on_other_ranks = not_served(subject).experts};
}

std::string as_format(const LoadedExpertsOptions& options) {
  return options.format ? " as " + format_name(*options.format) : "";
}

// The experts for the GPU, the same ones of every layer. Throws Error where not even one fits.
GpuParts gpu_parts(const LoadedExpertsOptions& options, const ServedSubject& subject) {
  const ModelConfig& c = subject.config;
  const FitRequest request = fit_request(options, subject);
  const GpuMemory memory = gpu_expert_memory(subject.stored, c, options.max_rows);
  const int n_layers = moe_layers(c, 0, c.n_all_layers() - 1);
  const auto of_each_layer = [&](int64_t n) {
    return evenly_on_gpu(c, n * n_layers, request.on_other_ranks);
  };
  const int64_t left = memory.left(of_each_layer(1), 0, 0);
  require(left >= 0,
          "{} has {:.2f} GB free, and one expert of every layer needs {:.2f} GB with the rows of "
          "--chunk {}: use a smaller --chunk, or --device cpu",
          memory.name, gigabytes(memory.free_bytes), gigabytes(memory.free_bytes - left),
          options.max_rows);
  GpuParts fitting = fit_gpu(request, memory).parts;
  if (all_on_gpu(fitting)) {
    require(!options.format,
            "--format{}: a GPU keeps experts as the checkpoint stores them, and all fit it: leave "
            "it out, or use --device cpu",
            options.format ? " " + format_name(*options.format) : "");
    return fitting;
  }
  int64_t least = c.router.n_experts;
  for (const std::vector<bool>& layer : fitting.experts)
    if (!layer.empty()) least = std::min(least, std::count(layer.begin(), layer.end(), true));
  return of_each_layer(std::max<int64_t>(1, least));
}

// Nothing where the CPU is to compute all.
std::optional<GpuParts> wanted_gpu_parts(const LoadedExpertsOptions& options,
                                         const ServedSubject& subject) {
  if (options.device == DeviceChoice::kCpu) return {};
  try {
    require(options.experts != kStandby,
            "--experts standby: a standby loads experts into its memory, and its CPU computes "
            "them: use --device cpu");
    require(!options.moves_experts,
            "--experts-move: experts on a GPU stay where they are: leave it out, or use --device "
            "cpu");
    return gpu_parts(options, subject);
  } catch (const Error& why) {
    if (options.device != DeviceChoice::kAuto) throw;
    options.warn(fmt::format("running on the CPU: {}", why.what()));
    return {};
  }
}

ExpertsLayout layout(const LoadedExpertsOptions& options, const ServedSubject& subject,
                     const Elsewhere& elsewhere) {
  const int64_t memory = machine_info().memory_bytes;
  const HostMemory host = {memory, [&](const ExpertsLayout& experts) {
                             const auto& [config, stored, home, of_layer] = subject;
                             const int64_t spare =
                                 options.moves_experts
                                     ? SpareExperts::bytes_for(stored, config, home, experts,
                                                               most_of_layer(experts, config))
                                     : 0;
                             return packed_bytes(stored, config, home, experts) + spare;
                           }};
  try {
    return fit_host(fit_request(options, subject), host, elsewhere);
  } catch (const Error&) {
    ExpertsLayout asked(options.format);
    asked.keep_elsewhere(elsewhere);
    fail(
        "experts {} need {:.1f} GB of memory{}{} and this machine has {:.1f} GB: let it have "
        "fewer, "
        "or keep them in int4",
        options.experts, host.bytes(asked) * 1e-9, as_format(options),
        options.moves_experts ? " with room for experts that move (--experts-move)" : "",
        memory * 1e-9);
  }
}

}  // namespace

ServedDivision divide_served(const LoadedExpertsOptions& options, const ServedSubject& subject) {
  ServedDivision division;
  if (std::optional<GpuParts> parts = wanted_gpu_parts(options, subject)) {
    for (const std::vector<bool>& layer : parts->experts)
      if (!layer.empty()) division.on_gpu = layer;
    division.gpu = *std::move(parts);
  }
  division.in_memory =
      layout(options, subject, division.has_gpu() ? beside_cpu(division.gpu) : not_served(subject));
  return division;
}

}  // namespace tandem
