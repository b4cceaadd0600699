// What the planner's model of costs says of a model on this machine's CPUs, with the rates that
// were measured beside it, to hold against what was measured.
#pragma once
#include "bench/bench_model.h"
#include "bench/machine_speed.h"
#include "core/machine.h"
#include "offload/plan/predict.h"

namespace tandem {

class CpuPrediction {
 public:
  // `config` outlives it.
  CpuPrediction(const ModelConfig& config, WeightFormats formats, const Machine& machine);

  // A step of one token of each of `batch` sequences at the end of `context`.
  double decode_seconds(int batch, int context) const;
  // A prompt of n tokens in steps of up to step_tokens.
  double prefill_seconds(int n, int step_tokens) const;

 private:
  double step_seconds(double tokens, double context, bool prefill) const;

  const ModelConfig& config_;
  const Machine machine_;
  Placement placement_;
};

// One node with these cores; peaks are measured for some milliseconds each.
Machine machine_of(MachineSpeed& speed, cpu::Isa isa, double read_bytes_per_second);

}  // namespace tandem
