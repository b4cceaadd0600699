// Copies vectors to a GPU, real or emulated, and back.
#pragma once
#include <vector>

#include "gpu_kernels/kernels.h"
#include "gpu_kernels/runtime.h"

namespace tandem::gpu {

template <class T>
Buffer on_gpu(Stream& stream, const std::vector<T>& from) {
  Buffer to(static_cast<int64_t>(from.size() * sizeof(T)), Site::kDevice);
  stream.copy(from.data(), to.bytes(), to.as<T>());
  stream.wait();
  return to;
}

// A buffer of n numbers, filled with NaN.
template <class T>
Buffer nans_on_gpu(int64_t n) {
  return Buffer(n * static_cast<int64_t>(sizeof(T)), Site::kDevice);
}

template <class T>
std::vector<T> from_gpu(Stream& stream, const Buffer& from) {
  std::vector<T> to(static_cast<size_t>(from.bytes()) / sizeof(T));
  stream.copy(from.as<T>(), from.bytes(), to.data());
  stream.wait();
  return to;
}

}  // namespace tandem::gpu
