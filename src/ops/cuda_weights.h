// Weights in the memory of a GPU, in the checkpoint's own numbers: FP8 with its scales, BF16, F32.
// FP16 becomes float, and packed INT4 becomes BF16. Reserve all first, then upload from many
// threads.
#pragma once
#include <condition_variable>
#include <functional>
#include <mutex>
#include <vector>

#include "core/memory.h"
#include "gpu_kernels/kernels.h"
#include "gpu_kernels/runtime.h"
#include "gpu_kernels/weight.h"
#include "model/weights.h"

namespace tandem {

class CudaWeights {
 public:
  // Bytes that reserve() will take for a weight as the checkpoint stores it.
  static int64_t bytes_of(const QuantView& stored, WeightUse use);
  // Throws Error when the card has less. In mapped memory the card reads over the link.
  void allocate(int64_t bytes, gpu::Site site = gpu::Site::kDevice);
  // Room on the card, whose rows begin at multiples of 16 bytes; vectors are float.
  QuantView reserve(const QuantView& stored, WeightUse use);

  // Copies rows of `on_gpu` from `rows`, n_rows of them as `stored` has them in the checkpoint, at
  // any address. Thread-safe. The scales of packed INT4 are read from `stored`.
  void upload_rows(const std::byte* rows, const QuantView& stored, const QuantView& on_gpu,
                   int64_t first_row, int64_t n_rows);
  // All scales of `on_gpu`.
  void upload_scales(const std::byte* scales, const QuantView& on_gpu);
  // Waits until all is there.
  void finish() { stream_.wait(); }

  int64_t bytes() const { return memory_.bytes(); }

 private:
  // Pinned memory on its way to the card.
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
  std::vector<Stage> stages_;  // that nobody fills
  int n_stages_ = 0;
  gpu::Stream stream_;  // last: it is waited for before the memory goes
};

// Matrices on the card, as their kernels take them: weights, and floats.
gpu::Weight gpu_weight(const QuantView& on_gpu);
inline gpu::Matrix gpu_matrix(TensorView t) { return {static_cast<float*>(t.data), t.stride}; }

}  // namespace tandem
