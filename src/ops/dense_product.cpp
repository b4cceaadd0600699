#include "ops/dense_product.h"

#include <dnnl.h>
#include <omp.h>

#include <algorithm>

#include "ops/cpu_weights.h"

namespace tandem {
namespace {

constexpr int64_t kPanelRows = 64;

// c[m, n] = a[m, k] b[n, k]^T, row-major, on the calling thread alone: the team is the only source
// of parallelism, oneDNN's own threads would compete with it for the cores.
void sgemm(TensorView a, TensorView b, TensorView c) {
  omp_set_num_threads(1);
  const dnnl_status_t status = dnnl_sgemm(
      'N', 'T', a.rows, b.rows, a.cols, 1.f, static_cast<const float*>(a.data), a.stride,
      static_cast<const float*>(b.data), b.stride, 0.f, static_cast<float*>(c.data), c.stride);
  check(status == dnnl_success, "dnnl_sgemm");
}

}  // namespace

void limit_dense_products(cpu::Isa isa) {
  if (isa == cpu::Isa::kAvx2) dnnl_set_max_cpu_isa(dnnl_cpu_isa_avx2);
}

DenseProduct::DenseProduct(const cpu::KernelTable& kernels, Team& team, int64_t max_cols)
    : kernels_(kernels),
      team_(team),
      arena_(Arena::padded_bytes(team.size() * kPanelRows * max_cols * size_of(DType::kF32))),
      panel_of_thread_(arena_.matrix(team.size() * kPanelRows, max_cols, DType::kF32)) {}

void DenseProduct::run(TensorView x, TensorView w, TensorView out) {
  const int64_t n_panels = (w.rows + kPanelRows - 1) / kPanelRows;
  team_.run(n_panels, [&](int64_t panel, int thread) {
    const int64_t first = panel * kPanelRows, n = std::min(kPanelRows, w.rows - first);
    TensorView rows = w.rows_from(first, n);
    if (w.dtype != DType::kF32) {
      TensorView wide{panel_of_thread_.row<float>(thread * kPanelRows), n, w.cols, w.cols,
                      DType::kF32};
      for (int64_t r = 0; r < n; ++r)
        kernels_.decode({rows.row_data(r), kernel_type(w.dtype), wide.row<float>(r), w.cols});
      rows = wide;
    }
    sgemm(x, rows, out.cols_from(first, n));
  });
}

}  // namespace tandem
