// A model with random weights on the CPU, with its forward pass and its cache.
#pragma once
#include "bench/bench_model.h"
#include "engine/step_runner.h"
#include "offload/cpu_experts.h"
#include "ops/cpu_ops.h"
#include "scheduling/kv_cache.h"

namespace tandem {

// All references outlive the object.
struct CpuBenchModel {
  CpuBenchModel(const ModelConfig& config, WeightFormats formats, const cpu::KernelTable& kernels,
                Team& team, StepLimits limits, int64_t cache_tokens)
      : home(kernels, team.topology()),
        weights(random_weights(
            config, formats, [](const WeightSpec&) { return true; }, home, team)),
        device(team),
        ops(kernels, config, limits.max_tokens, team),
        experts(kernels, config, weights, limits.max_tokens, team),
        model({config, weights, device, ops, experts}, limits, AttentionForm::kAuto),
        cache(config, cache_tokens, cache_type_for(kernels)) {}

  CpuWeights home;
  const ModelWeights weights;
  CpuDevice device;
  CpuOps ops;
  CpuExperts experts;
  StepRunner model;
  KvCache cache;
};

}  // namespace tandem
