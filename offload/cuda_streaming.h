// Experts of host memory that are brought to the card for a long step, a few at a time: while some
// are computed the next are on their way, also those of the next layer. Panels are copied as the
// CPU keeps them and become rows on the card.
#pragma once
#include <array>
#include <vector>

#include "offload/cpu_experts.h"
#include "offload/cuda_expert_rows.h"

namespace tandem {

class CudaStreaming {
 public:
  // All references outlive the object. Throws Error for experts that cannot be brought (takes()),
  // and when the card has too little memory.
  CudaStreaming(const ModelConfig& config, CpuExperts& experts, CudaExpertRows& rows,
                gpu::Stream& stream);
  // On the card.
  static int64_t bytes_for(const ModelConfig& config);
  // In panels, BF16 or FP8 with the checkpoint's blocks.
  static bool takes(const CpuExperts& experts);

  // y += sum of weight * expert(x). Ids are places among the layer's experts in host memory, -1
  // for others. Returns when all is enqueued; the team has copied.
  void add_to(const ExpertBatch& batch, TensorView y);

 private:
  static constexpr int kAtOnce = 2, kStages = 2;
  enum Matrix { kGate, kUp, kDown, kMatrices };
  struct Layer {
    std::vector<int> experts;  // in host memory
    gpu::Buffer scales;        // [experts][kMatrices][rows, columns] in blocks
  };
  struct Stage {
    gpu::Buffer pinned, panels;  // in host memory, and on the card
    gpu::Event copied, unpacked;
  };
  // A part of an expert's matrix as the CPU has it, one for each NUMA node.
  struct Part {
    Matrix matrix;
    QuantView packed;
    int64_t bytes, first_row, first_col;
  };
  template <class Visit>
  void for_each_part(int layer, int expert, Visit visit) const;
  void keep_scales(int layer);
  void bring(int layer, int first, int n, Stage& stage);
  void unpack(int layer, int first, int n, const Stage& stage);
  gpu::ExpertWeights weights(int layer, Matrix matrix, int first) const;
  int64_t rows_of(Matrix m) const { return m == kDown ? c_.dim : c_.expert_dim; }
  int64_t cols_of(Matrix m) const { return m == kDown ? c_.expert_dim : c_.dim; }
  int64_t row_bytes(Matrix m) const;
  int64_t number_bytes() const { return type_ == Number::kBF16 ? 2 : 1; }
  int64_t scales_before(int matrix) const;  // of an expert's scales; of all: kMatrices
  int64_t offset_of(Matrix m) const;        // of an expert's rows

  const ModelConfig& c_;
  const ModelWeights& w_;
  Team& team_;
  CudaExpertRows& rows_;
  gpu::Stream& stream_;
  Number type_;
  int block_;  // rows and columns of a scale; 0: none
  std::vector<Layer> layers_;
  gpu::Buffer experts_;  // on the card, [kAtOnce], rows
  std::array<Stage, kStages> stages_;
  int next_stage_ = 0;
  gpu::Stream copies_;
};

}  // namespace tandem
