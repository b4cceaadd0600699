// Transfers of a layer between the GPU and the CPU experts. One kernel writes the tokens' rows,
// experts and weights to mapped memory, another reads the CPU's sum there. Signals in mapped words
// order them, so that a step can be one recorded graph (docs/hybrid.md).
#pragma once
#include <chrono>
#include <span>
#include <vector>

#include "core/team.h"
#include "cpu_kernels/kernels.h"
#include "gpu_kernels/exchange/hand_off.h"
#include "gpu_kernels/exchange/signals.h"
#include "model/config.h"
#include "offload/gpu/cuda_expert_places.h"

namespace tandem {

class HandOff {
 public:
  struct Form {
    std::span<const std::vector<int32_t>> places;  // as ExpertPlaces takes them
    // [layers] row type of the CPU kernels; any for a layer without experts on the CPU.
    std::span<const cpu::ActivationType> rows_on_cpu;
    int max_tokens;         // tokens of a step
    bool gpu_waits = true;  // await_sum() is used
  };
  // The references outlive the object. Throws Error if kernel launches block on the stream, which
  // would deadlock a step, and when too little memory is left.
  HandOff(const ModelConfig& config, const Form& form, gpu::Stream& stream);
  // Bytes on the GPU.
  static int64_t bytes_for(const ModelConfig& config, int max_tokens);

  // Between steps: the places of a layer's experts from now on, as ExpertPlaces takes them.
  void set_places(int layer, std::span<const int32_t> places) { places_.set(layer, places); }

  // Functions for the GPU's side enqueue work and return.
  // Writes the batch for the CPU and signals it.
  void hand_down(const ExpertBatch& batch);
  // The ids that hand_down() has written for the GPU's experts: places, [n, n_active].
  TensorView gpu_ids(StepRows rows) const { return places_.ids(rows); }
  // Writes the same ids for a batch that is not handed down.
  TensorView placed(const ExpertBatch& batch) { return places_.placed(batch); }
  // Enqueues a wait for the CPU's next sum and its addition, y += sum, [n, dim], as one kernel.
  // Every row polls over the link, so there should be few.
  void add_next_sum(StepRows rows, TensorView y);
  // Enqueues a wait for the CPU's next sum.
  void await_sum() { sum_is_there_.await(stream_); }
  // y += the CPU's sum.
  void add_sum(StepRows rows, TensorView y);

  // Functions for the CPU's side run at once.
  // Returns when the GPU has handed down the next batch, which belongs to `layer`. The threads of
  // `team`, if any, poll meanwhile. Throws RunError when the GPU has failed or takes longer than
  // `patience`.
  void await_batch(int layer, Team* team, std::chrono::duration<double> patience);
  // The batch of that layer, in the form of CpuExperts.
  ExpertBatch batch(int layer, StepRows rows) const;
  // Buffer for the CPU's sum, [n, dim].
  TensorView sum(StepRows rows) const;
  // Signals that the sum is complete. Also releases the GPU when there will be none.
  void raise_sum() { sum_is_there_.raise(); }

 private:
  const ModelConfig& c_;
  gpu::Stream& stream_;
  std::vector<gpu::RowType> types_;  // [layers]
  int64_t row_place_ = 0;            // maximum bytes of a row in any layer
  ExpertPlaces places_;
  gpu::Buffer ids_, weights_, scales_, rows_;  // mapped, written by hand_down()
  gpu::Buffer sum_;                            // mapped, [max_tokens, dim]
  gpu::SignalToHost handed_down_;
  gpu::SignalToStream sum_is_there_;
};

}  // namespace tandem
