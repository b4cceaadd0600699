// Experts of host memory in a long step: some are brought to the card, two at a time, and computed
// there, while the CPU computes the others (expert_division.h). Panels are copied as the CPU keeps
// them and become rows on the card.
#pragma once
#include <array>
#include <span>
#include <vector>

#include "offload/cpu_experts.h"
#include "offload/cuda_expert_rows.h"
#include "offload/expert_division.h"

namespace tandem {

class CudaStreaming {
 public:
  // For steps of up to max_tokens tokens. All references outlive the object. Throws Error for
  // experts that cannot be brought (takes()), and when the card has too little memory.
  CudaStreaming(const ModelConfig& config, CpuExperts& experts, CudaExpertRows& rows,
                int max_tokens, gpu::Stream& stream);
  // On the card.
  static int64_t bytes_for(const ModelConfig& config, int max_tokens);
  // In panels, BF16 or FP8 with the checkpoint's blocks.
  static bool takes(const CpuExperts& experts);

  const ModelConfig& config() const { return c_; }

  // Measured here and now with the experts of one layer, for steps of up to so many tokens.
  ExpertRates measured_rates(int max_tokens);
  // What experts are divided by from now on. Before the first step.
  void divide_by(const ExpertRates& rates) { rates_ = rates; }

  // What can be done of a layer before it is known who is asked for: sends experts that it brought
  // in the step before, with the most rows, on their way.
  void prefetch(int layer);
  // The same tokens for both.
  struct Shared {
    ExpertBatch on_gpu;  // ids of all experts
    ExpertBatch on_cpu;  // in host memory, as CpuExperts takes it, without the ids of those that
                         // live on the card; ids of those that are brought become -1
    TensorView sum;      // [tokens, dim] in mapped memory, for the CPU's part
  };
  // y += sum of weight * expert(x) over the experts in host memory. Returns when the CPU's part is
  // done and the card's is enqueued; prefetch() came before.
  void add_to(const Shared& step, TensorView y);
  const Division& division() const { return division_; }      // of the last layer
  int64_t bytes_streamed() const { return bytes_streamed_; }  // so far

 private:
  static constexpr int kAtOnce = 2, kStages = 2;  // any two lie at an equal distance
  enum Matrix { kGate, kUp, kDown, kMatrices };
  struct Layer {
    std::vector<int> experts;  // in host memory, ascending
    gpu::Buffer scales;        // [experts][kMatrices][rows, columns] in blocks
    // Those that will be brought in the next step too, whole stages of them.
    std::array<int, kAtOnce * kStages> likely;
    int n_likely = 0;
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
  using Experts = std::span<const int>;  // up to kAtOnce of a layer
  void keep_scales(int layer);
  ExpertRates streaming_rates(int layer);
  void divide(const ExpertBatch& on_cpu);
  void sort_on_gpu(const ExpertBatch& batch);
  Stage& stage(int64_t i) { return stages_[(first_stage_ + i) % kStages]; }
  void bring(int layer, Experts experts, Stage& stage);
  int64_t copy_panels(int layer, Experts experts, Stage& stage);
  void send(int64_t bytes, Stage& stage);
  void compute(int layer, Experts experts, Stage& stage, int first);
  double cpu_seconds_of(int expert) const;
  void compute_on_cpu(double share);
  void hand_up(const TensorView& sum, TensorView y);
  void keep_likely(int layer);
  void unpack(int layer, Experts experts, const Stage& stage);
  gpu::ExpertWeights weights(int layer, Matrix matrix, Experts experts) const;
  int64_t place_of(int layer, int expert) const;  // among those in host memory
  int64_t rows_of(Matrix m) const { return m == kDown ? c_.dim : c_.expert_dim; }
  int64_t cols_of(Matrix m) const { return m == kDown ? c_.expert_dim : c_.dim; }
  int64_t row_bytes(Matrix m) const;
  int64_t number_bytes() const { return type_ == Number::kBF16 ? 2 : 1; }
  int64_t scales_before(int matrix) const;  // of an expert's scales; of all: kMatrices
  int64_t offset_of(Matrix m) const;        // of an expert's rows

  const ModelConfig& c_;
  CpuExperts& cpu_;
  const ModelWeights& w_;
  Team& team_;
  CudaExpertRows& rows_;
  gpu::Stream& stream_;
  Number type_;
  int block_;                // rows and columns of a scale; 0: none
  int64_t panel_bytes_ = 0;  // of an expert in a stage
  std::vector<Layer> layers_;
  gpu::Buffer experts_;  // on the card, [kAtOnce], rows
  std::array<Stage, kStages> stages_;
  int64_t first_stage_ = 0;  // of the layer
  gpu::Stream copies_;
  int64_t bytes_streamed_ = 0;

  ExpertRates rates_;
  Division division_;
  CudaExpertRows::Sorted sorted_ = {};  // the layer's, on the GPU
  std::vector<int> rows_asked_;         // [n_experts] of host memory, in this layer
  bool any_on_cpu_ = false;
  double cpu_seconds_ = 0, cpu_seconds_done_ = 0;  // as expected
  int next_on_cpu_ = 0;
  gpu::Buffer places_;  // mapped, [n_experts] among those that are brought
  gpu::Buffer ids_;     // on the card, [max_tokens, n_active], those places
};

}  // namespace tandem
