#include "with_gpu/cublas.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include "core/run_error.h"

namespace tandem {
namespace {

// Values of cublas_api.h and library_types.h, the same since CUDA 11.
constexpr int kTransposed = 1, kAsItIs = 0;  // cublasOperation_t
constexpr int kBFloat16 = 14;                // CUDA_R_16BF
constexpr int kFloatSums = 68;               // CUBLAS_COMPUTE_32F
constexpr int kUsualAlgorithm = -1;          // CUBLAS_GEMM_DEFAULT

}  // namespace

struct Cublas::Functions {
  explicit Functions(void* opened) : library(opened) {
    find(create, "cublasCreate_v2");
    find(destroy, "cublasDestroy_v2");
    find(set_stream, "cublasSetStream_v2");
    find(get_version, "cublasGetVersion_v2");
    find(gemm, "cublasGemmEx");
  }
  template <class F>
  void find(F*& function, const char* name) {
    function = reinterpret_cast<F*>(dlsym(library, name));
    complete = complete && function;
  }

  void* const library;  // stays loaded
  bool complete = true;
  // Each returns a cublasStatus_t, 0 for success.
  int (*create)(void** handle);
  int (*destroy)(void* handle);
  int (*set_stream)(void* handle, void* stream);
  int (*get_version)(void* handle, int* version);
  int (*gemm)(void* handle, int op_a, int op_b, int m, int n, int k, const void* alpha,
              const void* a, int type_a, int lda, const void* b, int type_b, int ldb,
              const void* beta, void* c, int type_c, int ldc, int compute, int algorithm);
};

std::span<const char* const> Cublas::usual_names() {
  static constexpr const char* kNames[] = {"libcublas.so.13", "libcublas.so.12",
                                           "/usr/local/cuda/lib64/libcublas.so.13",
                                           "/usr/local/cuda/lib64/libcublas.so.12"};
  return kNames;
}

std::unique_ptr<Cublas> Cublas::open(std::span<const char* const> names, void* stream,
                                     std::string& why_not) {
  void* library = nullptr;
  for (const char* name : names)
    if (!library) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
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

}  // namespace tandem
