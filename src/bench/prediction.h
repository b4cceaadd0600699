// The planner's prediction for a model on this machine, at the rates measured next to it, for
// comparison with measured times.
#pragma once
#include <vector>

#include "bench/bench_model.h"
#include "bench/costs.h"
#include "bench/machine/machine_speed.h"
#include "core/machine.h"
#include "offload/plan/predict.h"

namespace tandem {

class StepPrediction {
 public:
  // For a machine without a GPU: everything on the CPUs. With a GPU: backbone on the GPU, experts
  // on the CPUs. `config` must outlive the object.
  StepPrediction(const ModelConfig& config, WeightFormats formats, const Machine& machine);

  // Drafts are given: the time of drafting them is not included.
  double decode_seconds(DecodeShape shape) const;
  // A prompt of n tokens in steps of up to step_tokens tokens.
  double prefill_seconds(int n, int step_tokens) const;

  // Without the head, shared by GPU and CPUs: a token for each of `batch` sequences.
  double shared_decode_seconds(int batch, int context) const;
  // Without the head: n tokens of a prompt, with experts streamed to the GPU.
  double streamed_seconds(int n);

 private:
  Phase step(const StepShape& shape) const;

  const ModelConfig& config_;
  const Machine machine_;
  Placement placement_;
};

// Bursts that measure all rates of the cost model, in between the runs that it is compared with:
// the speed of a shared machine changes within seconds.
class RatesProbe {
 public:
  RatesProbe(MachineSpeed& speed, cpu::Isa isa, std::vector<EfficiencyCurve> curves)
      : speed_(speed), isa_(isa), curves_(std::move(curves)) {}
  // Takes about `seconds` in total, within limits.
  void burst(double seconds);
  int n_bursts() const { return static_cast<int>(bursts_.size()); }
  // A machine of one node with these cores and curves, and the medians of the bursts [first, end).
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
