// Experts of host memory in a long step: some are streamed to the GPU (cuda_expert_upload.h) and
// computed there, while the CPU computes the others (expert_division.h).
#pragma once
#include <array>
#include <vector>

#include "offload/expert_division.h"
#include "offload/gpu/cuda_expert_rows.h"
#include "offload/gpu/cuda_expert_upload.h"

namespace tandem {

class CudaStreaming {
 public:
  // For steps of up to max_tokens tokens. References outlive the object. Throws Error for experts
  // that cannot be uploaded (takes()), and when the GPU has too little memory.
  CudaStreaming(const ModelConfig& config, CpuExperts& experts, CudaExpertRows& rows,
                int max_tokens, gpu::Stream& stream);
  // Bytes on the GPU.
  static int64_t bytes_for(const ModelConfig& config, int max_tokens);
  static bool takes(const CpuExperts& experts) { return ExpertUpload::takes(experts); }

  const ModelConfig& config() const { return c_; }

  // Seconds per expert, measured here and now with the experts of one layer, for steps of up to
  // max_tokens tokens.
  ExpertRates measured_rates(int max_tokens);
  // The rates that divide the experts. Call before the first step.
  void divide_by(const ExpertRates& rates) { rates_ = rates; }

  // Between steps: the layer has other experts in host memory, as many as before.
  void moved(int layer) {
    likely_[layer].n = 0;
    upload_.read_experts(layer);
  }

  // Starts before the router has chosen: uploads the experts that had the most rows in the step
  // before.
  void prefetch(int layer);
  // Both parts have the same tokens.
  struct Shared {
    ExpertBatch on_gpu;  // ids of all experts
    ExpertBatch on_cpu;  // in host memory, as CpuExperts takes it, without the ids of experts that
                         // are kept on the GPU; ids of streamed experts become -1
    TensorView sum;      // [tokens, dim] in mapped memory, for the CPU's part
  };
  // y += sum of weight * expert(x) over the experts in host memory. Returns when the CPU's part is
  // done and the GPU's is enqueued. Call after prefetch().
  void add_to(const Shared& step, TensorView y);
  const Division& division() const { return division_; }  // of the last layer
  int64_t bytes_streamed() const { return upload_.bytes_sent(); }

 private:
  static constexpr int kAtOnce = ExpertUpload::kAtOnce;
  using Experts = ExpertUpload::Experts;
  // Experts of a layer that will probably be streamed in the next step too, in whole stages.
  struct Likely {
    std::array<int, kAtOnce * ExpertUpload::kStages> experts;
    int n = 0;
  };
  ExpertRates upload_rates(int layer);
  void divide(const ExpertBatch& on_cpu);
  void sort_on_gpu(const ExpertBatch& batch);
  int stage(int64_t i) const {
    return static_cast<int>((first_stage_ + i) % ExpertUpload::kStages);
  }
  void compute(int layer, Experts experts, int stage, int first);
  double cpu_seconds_of(int expert) const;
  void compute_on_cpu(double share);
  void hand_up(const TensorView& sum, TensorView y);
  void keep_likely(int layer);

  const ModelConfig& c_;
  CpuExperts& cpu_;
  CudaExpertRows& rows_;
  gpu::Stream& stream_;
  ExpertUpload upload_;
  std::vector<Likely> likely_;  // [layers]
  int64_t first_stage_ = 0;     // of the layer

  ExpertRates rates_;
  Division division_;
  CudaExpertRows::Sorted sorted_ = {};  // the layer's rows, on the GPU
  std::vector<int> rows_asked_;         // [n_experts] of host memory, in this layer
  bool any_on_cpu_ = false;
  double cpu_seconds_ = 0, cpu_seconds_done_ = 0;  // expected
  int next_on_cpu_ = 0;
  gpu::Buffer places_;  // mapped, [n_experts] index among the streamed experts, or -1
  gpu::Buffer ids_;     // on the GPU, [max_tokens, n_active] of these indices
};

}  // namespace tandem
