#include "with_gpu/cublas.h"

#include <fmt/format.h>

#include "core/run_error.h"
#include "core/shared_library.h"

namespace tandem {
namespace {

// Values of cublas_api.h and library_types.h, the same since CUDA 11.
constexpr int kTransposed = 1, kAsItIs = 0;  // cublasOperation_t
constexpr int kBFloat16 = 14;                // CUDA_R_16BF
constexpr int kFloatSums = 68;               // CUBLAS_COMPUTE_32F
constexpr int kUsualAlgorithm = -1;          // CUBLAS_GEMM_DEFAULT

}  // namespace

struct Cublas::Functions {
  explicit Functions(const SharedLibrary& library) {
    complete =
        library.find(create, "cublasCreate_v2") && library.find(destroy, "cublasDestroy_v2") &&
        library.find(set_stream, "cublasSetStream_v2") &&
        library.find(get_version, "cublasGetVersion_v2") && library.find(gemm, "cublasGemmEx");
    library.find(grouped_gemm, "cublasGemmGroupedBatchedEx");
  }

  bool complete;  // has all functions but grouped_gemm
  // Each returns a cublasStatus_t, 0 for success.
  int (*create)(void** handle);
  int (*destroy)(void* handle);
  int (*set_stream)(void* handle, void* stream);
  int (*get_version)(void* handle, int* version);
  int (*gemm)(void* handle, int op_a, int op_b, int m, int n, int k, const void* alpha,
              const void* a, int type_a, int lda, const void* b, int type_b, int ldb,
              const void* beta, void* c, int type_c, int ldc, int compute, int algorithm);
  // Arrays of n_groups values are on the host, those of addresses, one a product, on the GPU.
  int (*grouped_gemm)(void* handle, const int* op_a, const int* op_b, const int* m, const int* n,
                      const int* k, const void* alpha, const void* const* a, int type_a,
                      const int* lda, const void* const* b, int type_b, const int* ldb,
                      const void* beta, void* const* c, int type_c, const int* ldc, int n_groups,
                      const int* products_of_group, int compute);
};

std::span<const char* const> Cublas::usual_names() {
  static constexpr const char* kNames[] = {"libcublas.so.13", "libcublas.so.12",
                                           "/usr/local/cuda/lib64/libcublas.so.13",
                                           "/usr/local/cuda/lib64/libcublas.so.12"};
  return kNames;
}

std::unique_ptr<Cublas> Cublas::open(std::span<const char* const> names, void* stream,
                                     std::string& why_not) {
  const SharedLibrary library(names);
  why_not = "not installed";
  if (!library) return nullptr;
  auto call = std::make_unique<Functions>(library);
  why_not = "without the functions that are needed";
  if (!call->complete) return nullptr;
  void* handle = nullptr;
  const int status = call->create(&handle);
  why_not = fmt::format("does not start (status {})", status);
  if (status != 0) return nullptr;
  int version = 0;
  if (call->set_stream(handle, stream) != 0 || call->get_version(handle, &version) != 0) {
    call->destroy(handle);
    return nullptr;
  }
  why_not.clear();
  return std::unique_ptr<Cublas>(new Cublas(std::move(call), handle, version));
}

Cublas::Cublas(std::unique_ptr<Functions> functions, void* handle, int version)
    : call_(std::move(functions)), handle_(handle), version_(version) {}

Cublas::~Cublas() { call_->destroy(handle_); }

// The library is column-major: it sees our rows as columns of transposed matrices, and computes
// out^T = w x^T.
void Cublas::multiply(const BlasProduct& p) {
  const float one = 1, zero = 0;
  const int status =
      call_->gemm(handle_, kTransposed, kAsItIs, p.rows, p.n, p.cols, &one, p.w, kBFloat16,
                  static_cast<int>(p.w_stride), p.x, kBFloat16, static_cast<int>(p.x_stride), &zero,
                  p.out, kBFloat16, static_cast<int>(p.out_stride), kFloatSums, kUsualAlgorithm);
  require_run(status == 0, "cublasGemmEx: status {}", status);
}

BlasProducts::BlasProducts(std::span<const BlasProduct> products, gpu::Stream& stream) {
  std::vector<const void*> x, w;
  std::vector<void*> out;
  for (const BlasProduct& p : products) {
    if (p.n == 0) continue;
    rows_.push_back(p.rows);
    n_.push_back(p.n);
    cols_.push_back(p.cols);
    x_strides_.push_back(static_cast<int>(p.x_stride));
    w_strides_.push_back(static_cast<int>(p.w_stride));
    out_strides_.push_back(static_cast<int>(p.out_stride));
    x.push_back(p.x);
    w.push_back(p.w);
    out.push_back(p.out);
  }
  const auto upload = [&](const auto& addresses, gpu::Buffer& to) {
    to = gpu::Buffer(std::ssize(addresses) * int64_t{sizeof(void*)}, gpu::Site::kDevice);
    if (to.bytes() > 0) stream.copy(addresses.data(), to.bytes(), to.as<void>());
  };
  upload(x, x_);
  upload(w, w_);
  upload(out, out_);
  stream.wait();
}

bool Cublas::has_groups() const { return call_->grouped_gemm != nullptr; }

// Every product is a group of its own, because its number of rows is.
void Cublas::multiply(const BlasProducts& p) {
  const size_t n_groups = p.n_.size();
  if (n_groups == 0) return;
  const std::vector<int> transposed(n_groups, kTransposed), as_it_is(n_groups, kAsItIs),
      one_each(n_groups, 1);
  const std::vector<float> ones(n_groups, 1), zeros(n_groups, 0);
  const int status = call_->grouped_gemm(
      handle_, transposed.data(), as_it_is.data(), p.rows_.data(), p.n_.data(), p.cols_.data(),
      ones.data(), p.w_.as<const void*>(), kBFloat16, p.w_strides_.data(), p.x_.as<const void*>(),
      kBFloat16, p.x_strides_.data(), zeros.data(), p.out_.as<void*>(), kBFloat16,
      p.out_strides_.data(), static_cast<int>(n_groups), one_each.data(), kFloatSums);
  require_run(status == 0, "cublasGemmGroupedBatchedEx: status {}", status);
}

}  // namespace tandem
