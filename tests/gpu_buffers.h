// Buffers on the GPU that are filled from and read into vectors, and random numbers, for GPU tests.
#pragma once
#include <random>
#include <vector>

#include "gpu_kernels/numbers.h"
#include "gpu_kernels/runtime.h"

namespace tandem::gpu::test {

template <class T>
class OnGpuBuffer {
 public:
  OnGpuBuffer(Stream& stream, const std::vector<T>& from)
      : buffer_(from.size() * sizeof(T), Site::kDevice), n_(from.size()) {
    stream.copy(from.data(), n_ * sizeof(T), buffer_.as<T>());
    stream.wait();
  }
  explicit OnGpuBuffer(int64_t n) : buffer_(n * sizeof(T), Site::kDevice), n_(n) {}  // NaN

  T* data() const { return buffer_.as<T>(); }
  std::vector<T> values(Stream& stream) const {
    std::vector<T> v(n_);
    stream.copy(buffer_.as<T>(), n_ * sizeof(T), v.data());
    stream.wait();
    return v;
  }

 private:
  Buffer buffer_;
  int64_t n_;
};

inline std::vector<float> random_floats(std::mt19937& rng, int64_t n, float deviation) {
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> v(n);
  for (float& e : v) e = normal(rng);
  return v;
}

inline double rounded(float v) { return widen(narrow(v)); }

}  // namespace tandem::gpu::test
