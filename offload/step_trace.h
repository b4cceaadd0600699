// Times of a step that GPU and CPU share, for a Timeline: the GPU's are stamps that its stream
// writes, also in recorded steps. Without a timeline nothing is stamped.
#pragma once
#include <span>
#include <vector>

#include "gpu_kernels/runtime.h"
#include "offload/timeline.h"
#include "ops/expert_pool.h"

namespace tandem {

class StepTrace {
 public:
  // Places in a layer's work on the GPU, in this order.
  enum Point {
    kEntered,     // attention and router are done
    kHandedDown,  // the CPU has its rows
    kSubmitted,   // gate and up of the GPU's experts
    kSharedDone,  // the shared expert
    kResumed,     // what the other micro-batch had in between
    kOwnDone,     // down of the GPU's experts
    kSumSeen,     // the CPU's sum is there
    kLeft,        // and is added
    kPoints
  };
  struct CpuTimes {
    double waits, begins, ends;
  };
  // What a layer's spans are.
  struct Layer {
    bool on_gpu = false, on_cpu = false;
  };

  StepTrace(gpu::Stream& stream, int n_layers) : stream_(stream), n_layers_(n_layers) {}
  // From now on; steps that were recorded before are not stamped. The timeline outlives the object.
  // Steps then end in waiting for the GPU.
  void record(Timeline& timeline);

  void stamp(int layer, Ticket ticket, Point point);
  void add_cpu(int layer, Ticket ticket, CpuTimes times);
  // The last layer is enqueued. `streamed`: experts of host memory went to the GPU.
  void end_step(std::span<const Layer> layers, const MicroBatches& step, bool streamed);
  // Seconds of the clock of add_cpu().
  static double now();

 private:
  uint64_t* stamp_at(int layer, Ticket ticket, Point point) const {
    return stamps_.as<uint64_t>() + (int64_t{ticket} * n_layers_ + layer) * kPoints + point;
  }
  double seconds_of(int layer, Ticket ticket, Point point) const;
  void add_spans(std::span<const Layer> layers, Ticket ticket, bool streamed);

  gpu::Stream& stream_;
  const int n_layers_;
  Timeline* timeline_ = nullptr;
  gpu::Buffer stamps_;               // mapped, [kMaxTickets, layers, kPoints]
  std::vector<CpuTimes> cpu_times_;  // [kMaxTickets, layers]
  double clock_offset_ = 0;          // the CPU's clock less the GPU's
};

}  // namespace tandem
