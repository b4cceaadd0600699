// NVIDIA's cuBLAS, where installed, for comparison with the engine's own products only (docs/gpu.md
// gives the reasons for those). Opened at run time; no program links it.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gpu_kernels/numbers.h"
#include "gpu_kernels/runtime.h"

namespace tandem {

// out = x w^T, row-major with strides in elements between rows, sums in float.
struct BlasProduct {
  const bf16* x;  // [n, cols]
  const bf16* w;  // [rows, cols]
  bf16* out;      // [n, rows]
  int64_t x_stride, w_stride, out_stride;
  int n, rows, cols;
};

// Products for one call, with the addresses of their matrices on the GPU, where the library reads
// them. Products with n == 0 are left out.
class BlasProducts {
 public:
  BlasProducts(std::span<const BlasProduct> products, gpu::Stream& stream);

 private:
  friend class Cublas;
  std::vector<int> rows_, n_, cols_, x_strides_, w_strides_, out_strides_;  // one a product
  gpu::Buffer x_, w_, out_;                                                 // addresses
};

class Cublas {
 public:
  // Library names of CUDA 13 and 12: on the loader's path, and in the toolkit's folder.
  static std::span<const char* const> usual_names();
  // Opens the first of `names` that exists, for work on `stream`, a driver's
  // (gpu::Stream::handle()). Null if there is none or it does not start; then `why_not` gives the
  // reason.
  static std::unique_ptr<Cublas> open(std::span<const char* const> names, void* stream,
                                      std::string& why_not);
  ~Cublas();
  int version() const { return version_; }  // in the library's format: 130100
  // Enqueues the product. Throws RunError when the library refuses.
  void multiply(const BlasProduct& product);
  // Whether the library has grouped products, as 12.5 and later do; without, only multiply() of
  // BlasProducts is missing.
  bool has_groups() const;
  void multiply(const BlasProducts& products);

 private:
  struct Functions;
  Cublas(std::unique_ptr<Functions> functions, void* handle, int version);

  const std::unique_ptr<Functions> call_;
  void* const handle_;
  const int version_;
};

}  // namespace tandem
