// Times of a hybrid step for a Timeline. The GPU's are stamps that its stream writes, also in
// recorded steps. Nothing is stamped without a timeline.
#pragma once
#include <span>
#include <vector>

#include "gpu_kernels/runtime.h"
#include "offload/timeline.h"
#include "ops/expert_pool.h"

namespace tandem {

class StepTrace {
 public:
  // Points in a layer's work on the GPU, in this order.
  enum Point {
    kEntered,     // attention and router have ended
    kHandedDown,  // the rows are handed down to the CPU
    kSubmitted,   // gate and up of the GPU's experts have ended
    kSharedDone,  // the shared expert has ended
    kResumed,     // the other micro-batch's work in between has ended
    kOwnDone,     // down of the GPU's experts has ended
    kSumSeen,     // the CPU's sum has arrived
    kLeft,        // the CPU's sum is added
    kPoints
  };
  struct CpuTimes {
    double waits, begins, ends;
  };
  // Which devices compute a layer's experts.
  struct Layer {
    bool on_gpu = false, on_cpu = false;
  };

  StepTrace(gpu::Stream& stream, int n_layers) : stream_(stream), n_layers_(n_layers) {}
  // Starts recording; steps that were recorded before are not stamped. The timeline outlives the
  // object. Each step then waits for the GPU at its end.
  void record(Timeline& timeline);
  bool records() const { return timeline_ != nullptr; }

  void stamp(int layer, Ticket ticket, Point point);
  void add_cpu(int layer, Ticket ticket, CpuTimes times);
  // Call it when the last layer of a step of the layers `range` is enqueued. Layers for multi-token
  // prediction belong to the step before. `streamed`: experts were streamed to the GPU.
  void end_step(LayerRange range, std::span<const Layer> layers, const MicroBatches& step,
                bool streamed);
  // Seconds on the clock of add_cpu().
  static double now();

 private:
  uint64_t* stamp_at(int layer, Ticket ticket, Point point) const {
    return stamps_.as<uint64_t>() + (int64_t{ticket} * n_layers_ + layer) * kPoints + point;
  }
  double seconds_of(int layer, Ticket ticket, Point point) const;
  void add_spans(LayerRange range, std::span<const Layer> layers, Ticket ticket, bool streamed);

  gpu::Stream& stream_;
  const int n_layers_;
  Timeline* timeline_ = nullptr;
  gpu::Buffer stamps_;               // mapped, [kMaxTickets, layers, kPoints]
  std::vector<CpuTimes> cpu_times_;  // [kMaxTickets, layers]
  double clock_offset_ = 0;          // the CPU's clock minus the GPU's
};

}  // namespace tandem
