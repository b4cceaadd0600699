// What a layer hands from the GPU to the CPU's experts and back. One kernel writes the rows,
// experts and weights of the tokens into mapped memory, one reads the CPU's sum there; signals in
// mapped words order them, so that a step may be one recorded graph (docs/hybrid.md).
#pragma once
#include <chrono>
#include <span>
#include <vector>

#include "core/team.h"
#include "cpu_kernels/kernels.h"
#include "gpu_kernels/hand_off.h"
#include "gpu_kernels/signals.h"
#include "ops/expert_pool.h"

namespace tandem {

// Rows of a step that one micro-batch has.
struct StepRows {
  int first, n;
};
inline StepRows rows_of(const ExpertBatch& b) { return {b.first_row, static_cast<int>(b.x.rows)}; }
inline StepRows rows_of(const Batch& b) { return {b.first_row(), b.n()}; }

class HandOff {
 public:
  struct Form {
    // [layers][n_experts] place of an expert among those of the layer on the GPU; -1: on the CPU;
    // nothing for a dense layer.
    std::span<const std::vector<int32_t>> places;
    // [layers] in which the CPU's kernels want rows; any for a layer without experts on the CPU.
    std::span<const cpu::ActivationType> rows_on_cpu;
    int max_tokens;  // of a step
  };
  // The references outlive the object. Throws Error where launches wait for the stream, which would
  // hang a step, and when too little memory is left.
  HandOff(const ModelConfig& config, const Form& form, gpu::Stream& stream);
  // Bytes on the GPU.
  static int64_t bytes_for(const ModelConfig& config, int max_tokens);

  // On the GPU's side: each enqueues and returns.
  // Writes the batch for the CPU and signals it.
  void hand_down(const ExpertBatch& batch);
  // The ids of those tokens that hand_down() has written for the GPU's experts: their places.
  TensorView gpu_ids(StepRows rows) const;
  // Waits for the CPU's next sum.
  void await_sum() { sum_is_there_.await(stream_); }
  // y += the CPU's sum, [n, dim]
  void add_sum(StepRows rows, TensorView y);

  // On the CPU's side.
  // Returns when the GPU has handed down the next batch, which `layer` is said to be. The threads
  // of `team`, if any, poll meanwhile. Throws RunError when the GPU has failed or takes longer than
  // `patience`.
  void await_batch(int layer, Team* team, std::chrono::duration<double> patience);
  // That batch, as CpuExperts takes it.
  ExpertBatch batch(int layer, StepRows rows) const;
  // Where the CPU's sum goes, [n, dim].
  TensorView sum(StepRows rows) const;
  // The sum is there. Also lets the GPU go on when there will be none.
  void raise_sum() { sum_is_there_.raise(); }

 private:
  const ModelConfig& c_;
  gpu::Stream& stream_;
  std::vector<gpu::RowType> types_;            // [layers]
  int64_t row_place_ = 0;                      // bytes of a row of any layer
  gpu::Buffer places_;                         // [layers, n_experts]
  gpu::Buffer gpu_ids_;                        // [max_tokens, n_active]
  gpu::Buffer ids_, weights_, scales_, rows_;  // mapped, handed down
  gpu::Buffer sum_;                            // mapped, [max_tokens, dim]
  gpu::SignalToHost handed_down_;
  gpu::SignalToStream sum_is_there_;
};

}  // namespace tandem
