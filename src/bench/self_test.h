// `tandem selftest`: whether this machine computes what reference arithmetic computes, on the
// shapes of released models with random weights.
#pragma once
#include <span>

#include "bench/cpu_bench_model.h"
#include "bench/gpu_bench_model.h"

namespace tandem {

struct SelfTest {
  ModelConfig config;  // already reduced
  WeightFormats formats;
  std::span<const cpu::KernelTable> kernels;  // compared with the reference kernels
  GpuBenchModels gpus;                        // empty: the GPU is not tested
};

// The logits of one device after two random prompts.
struct SelfTestRow {
  std::string device = {};        // "cpu" or "cuda"
  std::string kernels = {};       // instruction set, or "gpu"
  int64_t n_rows = 0, vocab = 0;  // shape of the logits
  bool finite = false;
  double error = 0;  // largest difference from the reference's, over what the layers add to those
  double bound = 0;
  double seconds = 0;  // with making the weights
  bool passed() const { return finite && error <= bound; }
};

// Rows in the order of their computation, first that of the reference kernels, whose error is 0.
// Throws Error where the memory does not suffice.
void self_test(const SelfTest& test, Team& team,
               const std::function<void(const SelfTestRow& row)>& on_row);

}  // namespace tandem
