// The experts of a worker with a GPU: rows come from host memory, and their sums go back there. The
// CPU computes the experts that are not on the GPU at the same time.
#pragma once
#include <atomic>
#include <vector>

#include "core/progress_watch.h"
#include "offload/cpu_experts.h"
#include "offload/gpu/cuda_experts.h"

namespace tandem {

// The bits of a row's sum do not depend on the rows beside it (GpuWorkerRows in
// tests/gpu_hybrid_served_test.cpp), but on which of its experts are on the GPU: their sum is
// rounded before that of the others is added.
class CudaServedExperts final : public ExpertPool {
 public:
  struct Parts {
    const ModelWeights& on_gpu;
    CudaExperts& gpu;  // computes them on `stream`
    CpuExperts& cpu;   // computes the others
    gpu::Stream& stream;
  };
  // For batches of up to max_rows rows, which are float. References outlive the object.
  CudaServedExperts(const ModelConfig& config, const Parts& parts, int max_rows);
  // Bytes on the GPU.
  static int64_t bytes_for(const ModelConfig& config, int max_rows);

  // Throws RunError when the GPU was lost.
  void add_to(Ticket ticket, TensorView y) override;
  // Whether a batch waits for the GPU; thread-safe.
  WorkProgress progress() const { return {waits_, n_waits_}; }

 private:
  Ticket start(const ExpertBatch& batch) override;
  void divide(const ExpertBatch& batch);
  void enqueue(const ExpertBatch& batch);
  TensorView rows_in(const gpu::Buffer& buffer, int64_t n) const;

  const ModelConfig& c_;
  const Parts p_;
  const std::vector<std::vector<int32_t>> places_;  // CudaExperts::places()
  // A batch's arrays, on the GPU and mapped: rows and sums [rows, dim]; ids kI32 [rows, n_active]
  // among the layer's experts on the GPU, ascending, then -1, and after all of them their weights.
  gpu::Buffer x_, sums_, pairs_;
  gpu::Buffer x_of_host_, sums_of_host_, pairs_of_host_;
  std::vector<int32_t> cpu_ids_;              // [max_rows, n_active] -1 for an expert on the GPU
  bool uses_gpu_ = false, uses_cpu_ = false;  // of the batch
  std::atomic<bool> waits_{false};
  std::atomic<uint64_t> n_waits_{0};
};

}  // namespace tandem
