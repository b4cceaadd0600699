// Weights in GPU memory, in the checkpoint's own formats: FP8 with its scales, BF16, F32. FP16
// becomes float, and packed INT4 becomes BF16. All weights are reserved first, then uploaded by
// many threads.
#pragma once
#include <condition_variable>
#include <functional>
#include <mutex>
#include <vector>

#include "core/memory.h"
#include "gpu_kernels/kernels.h"
#include "gpu_kernels/products/weight.h"
#include "gpu_kernels/runtime.h"
#include "model/weights.h"

namespace tandem {

class CudaWeights {
 public:
  // Bytes that reserve() needs for a weight as the checkpoint stores it.
  static int64_t bytes_of(const QuantView& stored, WeightUse use);
  // Throws Error when the GPU has less memory. The GPU reads mapped memory over the link.
  void allocate(int64_t bytes, gpu::Site site = gpu::Site::kDevice);
  // Reserves GPU memory; rows are aligned to 16 bytes, and vectors become float.
  QuantView reserve(const QuantView& stored, WeightUse use);

  // What was reserved is given up.
  void clear() { arena_ = Arena(std::span(memory_.as<std::byte>(), memory_.bytes())); }

  // Copies n_rows rows from `rows`, stored in the checkpoint like `stored` and at any address, to
  // `on_gpu` from first_row on. Thread-safe. The scales of packed INT4 are read from `stored`.
  void upload_rows(const std::byte* rows, const QuantView& stored, const QuantView& on_gpu,
                   int64_t first_row, int64_t n_rows);
  // Copies all scales of `on_gpu`, stored like those of `stored` and at any address.
  void upload_scales(const std::byte* scales, const QuantView& stored, const QuantView& on_gpu);
  // Waits until all copies are done.
  void finish() { stream_.wait(); }

  int64_t bytes() const { return memory_.bytes(); }

 private:
  // Pinned memory for copies to the GPU.
  struct Stage {
    gpu::Buffer memory;
    gpu::Event copied;
  };
  static constexpr int kStages = 8;
  static constexpr int64_t kStageBytes = 4 << 20;
  void copy_rows(const TensorView& to, int64_t first_row, int64_t n_rows,
                 const std::function<void(int64_t row, std::byte* to)>& fill);
  Stage take_stage();
  void give_back(Stage stage);

  gpu::Buffer memory_;
  Arena arena_;
  std::mutex mutex_;
  std::condition_variable returned_;
  std::vector<Stage> stages_;  // stages that are not in use
  int n_stages_ = 0;
  gpu::Stream stream_;  // last: its destructor waits before the memory is freed
};

// Matrices in GPU memory as arguments of kernels: weights, and floats.
gpu::Weight gpu_weight(const QuantView& on_gpu);
inline gpu::Matrix gpu_matrix(TensorView t) { return {static_cast<float*>(t.data), t.stride}; }

}  // namespace tandem
