// What batches of different sizes ask of a placement: tokens per expert, arithmetic intensity, and
// what takes the time. It shows why sparse models want large batches.
#pragma once
#include <vector>

#include "offload/plan/predict.h"

namespace tandem {

struct BatchRow {
  double tokens = 0;                 // of a decode step, over all replicas
  double tokens_per_expert = 0;      // mean over all experts
  double experts_used = 0;           // expected number of a layer's experts that get a token
  double ops_per_byte = 0;           // of the used experts' products: arithmetic intensity
  bool reading = false;              // whether reading takes longer than arithmetic
  Part longest = Part::kCpuExperts;  // of an MoE layer's parts
  double step_seconds = 0, tokens_per_second = 0;
  bool kv_fits = false;  // that many sequences of the workload's context
};

struct BatchTable {
  bool on_gpu = false;            // owner of most experts
  double ridge_ops_per_byte = 0;  // of that owner: peak arithmetic over bandwidth
  std::vector<BatchRow> rows;     // 1, 2, 4 .. 65,536 tokens
};

// The model must have experts, and the placement owners for them.
BatchTable batch_table(const PlanInput& input, const Placement& placement);

}  // namespace tandem
