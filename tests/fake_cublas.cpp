// The functions of cuBLAS that the comparison calls, as NVIDIA documents them: column-major,
// unoptimised, and for one combination of arguments only. All others are refused.
#include <bit>
#include <cstdint>

namespace {

float widened(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
uint16_t narrowed(float v) {
  const auto u = std::bit_cast<uint32_t>(v);
  return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

int library = 0;  // the object that handles point to
constexpr int kInvalidValue = 7, kNotSupported = 15;

}  // namespace

extern "C" {
int cublasCreate_v2(void** handle) {
  *handle = &library;
  return 0;
}
int cublasDestroy_v2(void* handle) { return handle == &library ? 0 : 1; }
int cublasSetStream_v2(void* handle, void*) { return handle == &library ? 0 : 1; }
int cublasGetVersion_v2(void* handle, int* version) {
  *version = 130001;
  return handle == &library ? 0 : 1;
}
// Computes c[m, n] = a^T b in BF16 with float sums.
int cublasGemmEx(void* handle, int op_a, int op_b, int m, int n, int k, const void* alpha,
                 const void* a, int type_a, int lda, const void* b, int type_b, int ldb,
                 const void* beta, void* c, int type_c, int ldc, int compute, int algorithm) {
  if (handle != &library || lda < k || ldb < k || ldc < m) return kInvalidValue;
  if (op_a != 1 || op_b != 0 || type_a != 14 || type_b != 14 || type_c != 14 || compute != 68 ||
      algorithm != -1 || *static_cast<const float*>(alpha) != 1 ||
      *static_cast<const float*>(beta) != 0)
    return kNotSupported;
  for (int64_t column = 0; column < n; ++column)
    for (int64_t row = 0; row < m; ++row) {
      float sum = 0;
      for (int64_t i = 0; i < k; ++i)
        sum += widened(static_cast<const uint16_t*>(a)[row * lda + i]) *
               widened(static_cast<const uint16_t*>(b)[column * ldb + i]);
      static_cast<uint16_t*>(c)[column * ldc + row] = narrowed(sum);
    }
  return 0;
}
}
