// What the planner's model of costs says of a model on this machine, with the rates that were
// measured beside it, to hold against what was measured.
#pragma once
#include <vector>

#include "bench/bench_model.h"
#include "bench/machine_speed.h"
#include "core/machine.h"
#include "offload/plan/predict.h"

namespace tandem {

class StepPrediction {
 public:
  // Of the CPUs alone, or, where the machine has a GPU, of a backbone there and experts on the
  // CPUs. `config` outlives it.
  StepPrediction(const ModelConfig& config, WeightFormats formats, const Machine& machine);

  // A step of one token of each of `batch` sequences at the end of `context`.
  double decode_seconds(int batch, int context) const;
  // A prompt of n tokens in steps of up to step_tokens.
  double prefill_seconds(int n, int step_tokens) const;

  // Without logits, shared by GPU and CPUs: a token of each of `batch` sequences,
  double shared_decode_seconds(int batch, int context) const;
  // and n tokens of a prompt, with experts brought to the GPU.
  double streamed_seconds(int n);

 private:
  Phase step(double tokens, double context, bool prefill) const;

  const ModelConfig& config_;
  const Machine machine_;
  Placement placement_;
};

// Bursts of all rates that the model of costs asks for, between the runs that are held against it:
// how fast a shared machine reads and multiplies changes within seconds.
class RatesProbe {
 public:
  RatesProbe(MachineSpeed& speed, cpu::Isa isa, std::vector<EfficiencyCurve> curves)
      : speed_(speed), isa_(isa), curves_(std::move(curves)) {}
  // About `seconds` in all, within bounds.
  void burst(double seconds);
  int n_bursts() const { return static_cast<int>(bursts_.size()); }
  // One node with these cores and curves and the medians of the bursts [first, end).
  Machine machine(int first, int end) const;

 private:
  struct Rates {
    double read, one_thread_read;
    PeakRates peak;
  };
  MachineSpeed& speed_;
  const cpu::Isa isa_;
  const std::vector<EfficiencyCurve> curves_;
  std::vector<Rates> bursts_;
};

}  // namespace tandem
