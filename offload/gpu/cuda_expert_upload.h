// Copies experts from host memory to the GPU, two at a time, in two stages: while one crosses the
// link, the experts of the other are computed. Panels cross as the CPU keeps them and become rows
// on the GPU.
#pragma once
#include <array>
#include <span>
#include <vector>

#include "gpu_kernels/kernels.h"
#include "offload/cpu_experts.h"
#include "ops/cuda_ops.h"

namespace tandem {

class ExpertUpload {
 public:
  static constexpr int kAtOnce = 2;  // experts of a stage: any two are an equal stride apart
  static constexpr int kStages = 2;
  using Experts = std::span<const int>;  // up to kAtOnce of one layer
  enum Matrix { kGate, kUp, kDown, kMatrices };

  // References outlive the object. Throws Error for experts that cannot be uploaded (takes()), and
  // when the GPU has too little memory.
  ExpertUpload(const ModelConfig& config, CpuExperts& experts, gpu::Stream& stream);
  // Bytes on the GPU.
  static int64_t bytes_for(const ModelConfig& config);
  // True for experts in panels, in BF16 or in FP8 with the checkpoint's blocks.
  static bool takes(const CpuExperts& experts);

  // The layer's experts in host memory, ascending.
  const std::vector<int>& experts(int layer) const { return layers_[layer].experts; }

  // Between steps: reads which experts of a layer are in host memory, and keeps their scales.
  void read_experts(int layer);

  // Copies the experts into the stage and starts sending them, once what it held before has been
  // unpacked. The CPU team copies to pinned memory, which the link reads at its full speed.
  void start(int layer, Experts experts, int stage);
  // Enqueues, once they have arrived, their unpacking to rows: weights() until the next call.
  void finish(int layer, Experts experts, int stage);
  gpu::ExpertWeights weights(int layer, Matrix matrix, Experts experts) const;

  int64_t bytes_sent() const { return bytes_sent_; }

  // The two halves of start(), to be timed one by one. copy() returns the bytes of the stage that
  // are used.
  int64_t copy(int layer, Experts experts, int stage);
  void send(int64_t bytes, int stage);
  void wait() { copies_.wait(); }

 private:
  struct Layer {
    std::vector<int> experts;
    gpu::Buffer scales;  // [experts][kMatrices][rows, columns] in blocks
  };
  struct Stage {
    gpu::Buffer pinned, panels;  // in host memory, and on the GPU
    gpu::Event copied, unpacked;
  };
  // The piece of an expert's matrix that one NUMA node keeps.
  struct Piece {
    Matrix matrix;
    QuantView packed;
    int64_t bytes, first_row, first_col;
  };
  template <class Visit>
  void for_each_piece(int layer, int expert, Visit visit) const;
  void keep_scales(int layer);
  int64_t index_of(int layer, int expert) const;  // among the layer's experts in host memory
  int64_t rows_of(Matrix m) const { return m == kDown ? c_.dim : c_.expert_dim; }
  int64_t cols_of(Matrix m) const { return m == kDown ? c_.expert_dim : c_.dim; }
  int64_t row_bytes(Matrix m) const;
  int64_t number_bytes() const { return type_ == Number::kBF16 ? 2 : 1; }
  int64_t scales_before(int matrix) const;  // of an expert's scales; kMatrices: all of them
  int64_t offset_of(Matrix m) const;        // of an expert's rows

  const ModelConfig& c_;
  const ModelWeights& w_;
  Team& team_;
  gpu::Stream& stream_;
  Number type_;
  int block_;                // rows and columns of a scale; 0: none
  int64_t panel_bytes_ = 0;  // of an expert in a stage
  std::vector<Layer> layers_;
  gpu::Buffer rows_;  // on the GPU, [kAtOnce] experts
  std::array<Stage, kStages> stages_;
  gpu::Stream copies_;
  int64_t bytes_sent_ = 0;
};

}  // namespace tandem
