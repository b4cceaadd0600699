// Products of many tokens. Concurrent blocks share their part of w, and all of x stays in the
// level-2 cache.
#include "device.h"
#include "gpu_kernels/products/matrix_tile.h"
#include "gpu_kernels/products/products.h"
#include "gpu_kernels/reduce.h"

namespace tandem::gpu {
namespace {

struct KernelArgs {
  MatrixArgs a;
  int steps_each;  // steps of 64 columns per block of blockIdx.z
};

struct LastBlock {
  bool is;
};

template <class Tile>
__device__ void store(const MatrixArgs& a, const typename Tile::Sums& sum, LastBlock& last);
__device__ void add_parts(const MatrixArgs& a, int first_token, int n_tokens, int first_row,
                          int n_rows);

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    matrix_kernel(const __grid_constant__ KernelArgs k) {
  auto& s = shared_memory<typename Tile::Shared>();
  const MatrixArgs& a = k.a;
  const int n_steps = (a.w.cols + Tile::kColumns - 1) / Tile::kColumns;
  const int first = blockIdx.z * k.steps_each, end = min(n_steps, first + k.steps_each);
  const auto x_row = [&](int row) {
    return Tile::x_row(a.x, a.x_stride, a.x_fp8,
                       min(static_cast<int>(blockIdx.x) * Tile::kTokens + row, a.n_tokens - 1));
  };
  const auto w_row = [&](int row) {
    return typename Tile::WeightRow{
        a.w, min(static_cast<int>(blockIdx.y) * Tile::kRows + row, a.w.rows - 1)};
  };
  typename Tile::Sums sum = {};
  Tile::multiply(Tile::sources(a.w, x_row, w_row), first, end, s, sum);
  __syncthreads();  // shared memory is reused below
  store<Tile>(a, sum, reinterpret_cast<LastBlock&>(s));
}

template <class Tile>
__device__ void store(const MatrixArgs& a, const typename Tile::Sums& sum, LastBlock& last) {
  const bool whole = gridDim.z == 1;
  float* out = whole ? a.out : a.workspace.partial + int64_t{blockIdx.z} * a.n_tokens * a.w.rows;
  const int64_t stride = whole ? a.out_stride : a.w.rows;
  const int first_token = blockIdx.x * Tile::kTokens, first_row = blockIdx.y * Tile::kRows;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < Tile::kMTiles; ++m)
#pragma unroll
    for (int n = 0; n < Tile::kNTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = first_token + Tile::first_token_of_warp() + m * 16 + lane / 4 + i / 2 * 8;
        const int row = first_row + Tile::first_row_of_warp() + n * 8 + lane % 4 * 2 + i % 2;
        if (token >= a.n_tokens || row >= a.w.rows) continue;
        if (a.out)
          out[token * stride + row] = sum[m][n][i];
        else
          a.rounded[token * stride + row] = to_bf16(sum[m][n][i]);
      }
  if (whole) return;
  uint32_t* counter = a.workspace.counters + blockIdx.y * gridDim.x + blockIdx.x;
  if (is_last_block(counter, gridDim.z, last.is))
    add_parts(a, first_token, min(Tile::kTokens, a.n_tokens - first_token), first_row,
              min(Tile::kRows, a.w.rows - first_row));
}

__device__ void add_parts(const MatrixArgs& a, int first_token, int n_tokens, int first_row,
                          int n_rows) {
  const int64_t part = int64_t{a.n_tokens} * a.w.rows;
  for (int i = threadIdx.x; i < n_tokens * n_rows; i += blockDim.x) {
    const int64_t token = first_token + i / n_rows, row = first_row + i % n_rows;
    const float* from = a.workspace.partial + token * a.w.rows + row;
    float sum = 0;
#pragma unroll 4
    for (unsigned split = 0; split < gridDim.z; ++split) sum += from[split * part];
    a.out[token * a.out_stride + row] = sum;
  }
}

constexpr int kTileRows = 128;  // rows of w, for any number of tokens

// Fewer tokens use smaller tiles; so do many tokens if w has too few rows to occupy every
// multiprocessor, and then blocks also split the columns of w.
struct Plan {
  int tile_tokens, splits, steps_each;
};

Plan plan_of(const Weight& w, int n_tokens, int n_multiprocessors) {
  const int row_tiles = (w.rows + kTileRows - 1) / kTileRows;
  const auto n_tiles = [&](int tokens) { return (n_tokens + tokens - 1) / tokens * row_tiles; };
  Plan plan = {tile_tokens_for(n_tokens), 1, 0};
  while (plan.tile_tokens > 32 && n_tiles(plan.tile_tokens) < n_multiprocessors)
    plan.tile_tokens /= 2;
  const int n_steps = (w.cols + 63) / 64, tiles = n_tiles(plan.tile_tokens);
  const int wanted = tiles <= kCounters ? max(1, 2 * n_multiprocessors / tiles) : 1;
  plan.steps_each = max(8, (n_steps + wanted - 1) / wanted);
  plan.splits = (n_steps + plan.steps_each - 1) / plan.steps_each;
  return plan;
}

template <class Tile>
void launch_tile(const Stream& stream, const KernelArgs& k, int splits) {
  static_assert(Tile::kRows == kTileRows);
  launch(matrix_kernel<Tile>,
         {.grid_x = (k.a.n_tokens + Tile::kTokens - 1) / Tile::kTokens,
          .grid_y = (k.a.w.rows + Tile::kRows - 1) / Tile::kRows,
          .grid_z = splits,
          .threads = Tile::kThreads,
          .shared_bytes = sizeof(typename Tile::Shared)},
         stream, k);
}

}  // namespace

void matrix_product(const Stream& stream, const MatrixArgs& a) {
  const Plan plan = plan_of(a.w, a.n_tokens, a.out ? a.n_multiprocessors : 0);
  with_tile(a.w, a.x_fp8, plan.tile_tokens, [&]<class Tile>() {
    launch_tile<Tile>(stream, {a, plan.steps_each}, plan.splits);
  });
}

int64_t matrix_partials(const Weight& w, int n_tokens, int n_multiprocessors) {
  const Plan plan = plan_of(w, n_tokens, n_multiprocessors);
  return plan.splits == 1 ? 0 : int64_t{plan.splits} * n_tokens * w.rows;
}

}  // namespace tandem::gpu
