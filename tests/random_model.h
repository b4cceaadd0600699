// Small random models in memory, and an engine on them as the product builds it.
#pragma once
#include <cstddef>
#include <deque>
#include <random>
#include <span>
#include <vector>

#include "engine/step_runner.h"
#include "loader/weights/pack_weights.h"
#include "offload/cpu_experts.h"
#include "ops/cpu_ops.h"

namespace tandem::test {

uint16_t to_bf16(float v);

// A stored checkpoint of random numbers. Matrices have the given dtype, FP8 with block scales.
struct RandomModel {
  ModelConfig config;
  ModelWeights stored;
  std::deque<std::vector<std::byte>> storage;
  std::mt19937 rng{7};

  RandomModel(const ModelConfig& c, DType matrices);

  TensorView room(int64_t rows, int64_t cols, DType dtype);

  TensorView floats(int64_t rows, int64_t cols, float mean, float deviation, DType dtype);

  QuantView int4_words(int64_t rows, int64_t cols, int group);

  QuantView matrix(int64_t rows, int64_t cols, DType dtype);
};

void fill_with_nan(const TensorView& t);

void run_jobs(const PackedModel& packed, const CpuWeights& home);

// The product's engine on a stored model. The cache is filled with NaN.
struct TestEngine {
  cpu::KernelTable kernels;
  CpuWeights home;
  PackedModel packed;
  Team team;
  CpuDevice device;
  CpuOps ops;
  CpuExperts experts;
  StepRunner model;
  KvCache cache;

  TestEngine(RandomModel& m, cpu::Isa isa, AttentionForm form, DType cache_type = DType::kF32,
             int n_threads = 0, int max_tokens = 256);

  TestEngine(const ModelConfig& config, ModelWeights& stored, cpu::Isa isa, AttentionForm form,
             DType cache_type = DType::kF32, const Topology& topology = this_topology(),
             int max_tokens = 256);

  // Logits of every token, in steps of `chunk` tokens, on the given pages.
  std::vector<std::vector<float>> run(const std::vector<int32_t>& tokens, int chunk,
                                      const std::vector<int32_t>& pages);

  struct Part {
    std::span<const int32_t> tokens;
    int first_position;
    std::span<const int32_t> pages;
  };
  // One step of several sequences; returns the logits of every token in order.
  std::vector<std::vector<float>> step(const std::vector<Part>& parts);
};

}  // namespace tandem::test
