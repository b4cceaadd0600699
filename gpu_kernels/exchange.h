// Rows of tokens as GPUs exchange them: a token's row, the ids of its experts and their weights
// side by side, so that one transfer takes all.
#pragma once
#include "gpu_kernels/kernels.h"

namespace tandem::gpu {

// Floats from one packed row to the next: a multiple of 4, so that rows begin at whole 16 bytes.
constexpr int64_t packed_row_stride(int64_t dim, int64_t n_active) {
  return (dim + 2 * n_active + 3) / 4 * 4;
}

// out[t] = x[t], ids[t], weights[t] for t below `tokens`. Rows from there to `rows` get ids of -1.
struct PackRowsArgs {
  Matrix x;            // [tokens, dim]
  const int32_t* ids;  // [tokens, n_active], rows ids_stride apart
  int64_t ids_stride;
  Matrix weights;  // [tokens, n_active]
  Matrix out;      // [rows, packed_row_stride()]
  int tokens, rows, dim, n_active;
};
void pack_rows(const Stream& stream, const PackRowsArgs& args);

}  // namespace tandem::gpu
