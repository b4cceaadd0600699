// Where the experts of a model are, for a GPU that has some of them.
#pragma once
#include <span>
#include <vector>

#include "gpu_kernels/runtime.h"
#include "model/config.h"
#include "ops/expert_pool.h"

namespace tandem {

// Rows of a step that belong to one micro-batch.
struct StepRows {
  int first, n;
};
inline StepRows rows_of(const ExpertBatch& b) { return {b.first_row, static_cast<int>(b.x.rows)}; }
inline StepRows rows_of(const Batch& b) { return {b.first_row(), b.n()}; }

class ExpertPlaces {
 public:
  // Places of experts that this GPU does not have.
  static constexpr int32_t kOnCpu = -1, kOnOtherRank = -2;

  // places: [layers][n_experts] index of an expert among those of the layer on the GPU, or one of
  // the above; empty for a dense layer. For steps of up to max_tokens tokens. The stream outlives
  // the object.
  ExpertPlaces(const ModelConfig& config, std::span<const std::vector<int32_t>> places,
               int max_tokens, gpu::Stream& stream);
  // Bytes on the GPU.
  static int64_t bytes_for(const ModelConfig& config, int max_tokens);

  // Between steps: the places of a layer from now on, [n_experts].
  void set(int layer, std::span<const int32_t> places);
  const int32_t* of_layer(int layer) const;  // [n_experts], on the GPU
  // Room for the places of a step's chosen experts on the GPU, [n, n_active].
  TensorView ids(StepRows rows) const;
  // Enqueues writing them: ids(rows_of(batch)).
  TensorView placed(const ExpertBatch& batch);

 private:
  const ModelConfig& c_;
  gpu::Stream& stream_;
  gpu::Buffer places_;  // [layers, n_experts]
  gpu::Buffer ids_;     // [max_tokens, n_active]
};

}  // namespace tandem
