// NVIDIA's library of products, where the machine has it: what ours are held against, and nothing
// else (docs/gpu.md says why they are our own). It is opened at run time; no program links it.
#pragma once
#include <memory>
#include <span>
#include <string>

#include "gpu_kernels/numbers.h"
#include "gpu_kernels/runtime.h"

namespace tandem {

// out = x w^T, each row-major with rows a stride of numbers apart, sums in float.
struct BlasProduct {
  const bf16* x;  // [n, cols]
  const bf16* w;  // [rows, cols]
  bf16* out;      // [n, rows]
  int64_t x_stride, w_stride, out_stride;
  int n, rows, cols;
};

class Cublas {
 public:
  // Where CUDA 13 and 12 have it: what the loader finds, and the toolkit's folder.
  static std::span<const char* const> usual_names();
  // The first of `names` that there is, for work on `stream`, a driver's (gpu::Stream::handle());
  // null where there is none, or it does not start: then `why_not` says so.
  static std::unique_ptr<Cublas> open(std::span<const char* const> names, void* stream,
                                      std::string& why_not);
  ~Cublas();
  int version() const { return version_; }  // as the library counts: 130100
  // Enqueues it. Throws RunError when the library refuses.
  void multiply(const BlasProduct& product);

 private:
  struct Functions;
  Cublas(std::unique_ptr<Functions> functions, void* handle, int version);

  const std::unique_ptr<Functions> call_;
  void* const handle_;
  const int version_;
};

}  // namespace tandem
