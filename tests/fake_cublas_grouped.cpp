// The grouped product of cuBLAS 12.5 and later, as NVIDIA documents it, of groups that the
// comparison may give it only; the products are fake_cublas.cpp's.
extern "C" {
int cublasGemmEx(void* handle, int op_a, int op_b, int m, int n, int k, const void* alpha,
                 const void* a, int type_a, int lda, const void* b, int type_b, int ldb,
                 const void* beta, void* c, int type_c, int ldc, int compute, int algorithm);

int cublasGemmGroupedBatchedEx(void* handle, const int* op_a, const int* op_b, const int* m,
                               const int* n, const int* k, const void* alpha, const void* const* a,
                               int type_a, const int* lda, const void* const* b, int type_b,
                               const int* ldb, const void* beta, void* const* c, int type_c,
                               const int* ldc, int n_groups, const int* products_of_group,
                               int compute) {
  constexpr int kInvalidValue = 7, kUsualAlgorithm = -1;
  int product = 0;
  for (int g = 0; g < n_groups; ++g) {
    if (m[g] <= 0 || n[g] <= 0 || k[g] <= 0 || products_of_group[g] <= 0) return kInvalidValue;
    for (int i = 0; i < products_of_group[g]; ++i, ++product) {
      const int status =
          cublasGemmEx(handle, op_a[g], op_b[g], m[g], n[g], k[g],
                       static_cast<const float*>(alpha) + g, a[product], type_a, lda[g], b[product],
                       type_b, ldb[g], static_cast<const float*>(beta) + g, c[product], type_c,
                       ldc[g], compute, kUsualAlgorithm);
      if (status != 0) return status;
    }
  }
  return 0;
}
}
