// Products of routed experts: a block determines its expert and rows from its index, then computes
// an ordinary product tile. Gate and up rows of w alternate in the tile, so that a lane has both
// values of a column.
#include "device.h"
#include "gpu_kernels/products/matrix_tile.h"
#include "gpu_kernels/products/products.h"

namespace tandem::gpu {
namespace {

// Rows [first, first + n) of one expert; n = 0: nothing to do.
struct RowTile {
  int expert, first, n;
};

__device__ RowTile row_tile_of_block(const ExpertRows& rows, int tile_rows);
__device__ Weight weight_of(const ExpertWeights& w, int expert);

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    gate_up_kernel(const __grid_constant__ GateUpArgs a) {
  constexpr int kHalf = Tile::kNTiles / 2, kHidden = Tile::kRows / 2;
  auto& s = shared_memory<typename Tile::Shared>();
  const RowTile rows = row_tile_of_block(a.rows, Tile::kTokens);
  if (rows.n == 0) return;
  const Weight gate = weight_of(a.gate, rows.expert), up = weight_of(a.up, rows.expert);
  // The first half of each warp's rows of w is gate, the second half the same rows of up.
  const auto hidden_of = [&](int row) {
    return static_cast<int>(blockIdx.y) * kHidden + row / (2 * kHalf * 8) * (kHalf * 8) +
           row % (kHalf * 8);
  };
  const auto x_row = [&](int row) {
    return Tile::x_row(a.x, a.x_stride, a.x_fp8, a.tokens[rows.first + min(row, rows.n - 1)]);
  };
  const auto w_row = [&](int row) {
    return typename Tile::WeightRow{row % (2 * kHalf * 8) < kHalf * 8 ? gate : up,
                                    min(hidden_of(row), gate.rows - 1)};
  };
  const int column = hidden_of(Tile::first_row_of_warp()) + threadIdx.x % 4 * 2;
  typename Tile::Sums sum = {};
  Tile::multiply(Tile::sources(gate, x_row, w_row), 0,
                 (gate.cols + Tile::kColumns - 1) / Tile::kColumns, s, sum);
#pragma unroll
  for (int m = 0; m < Tile::kMTiles; ++m)
#pragma unroll
    for (int n = 0; n < kHalf; ++n)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const int row = Tile::first_token_of_warp() + m * 16 + threadIdx.x % 32 / 4 + i / 2 * 8;
        const int c = column + n * 8;
        float h[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float g = sum[m][n][i + e], u = sum[m][n + kHalf][i + e];
          h[e] = c + e < gate.rows ? g / (1 + __expf(-g)) * u : 0;
        }
        if (row < rows.n && c < a.hidden_stride)
          *reinterpret_cast<uint32_t*>(a.hidden + (rows.first + row) * a.hidden_stride +
                                       product_column(c)) = pack_bf16(h[0], h[1]);
      }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    down_kernel(const __grid_constant__ GroupedDownArgs a) {
  auto& s = shared_memory<typename Tile::Shared>();
  const RowTile rows = row_tile_of_block(a.rows, Tile::kTokens);
  if (rows.n == 0) return;
  const Weight w = weight_of(a.down, rows.expert);
  const int first = blockIdx.y * Tile::kRows;
  const auto x_row = [&](int row) {
    return Tile::x_row(a.hidden, a.hidden_stride, a.hidden_fp8, rows.first + min(row, rows.n - 1));
  };
  const auto w_row = [&](int row) {
    return typename Tile::WeightRow{w, min(first + row, w.rows - 1)};
  };
  const int column = first + Tile::first_row_of_warp() + threadIdx.x % 4 * 2;
  typename Tile::Sums sum = {};
  Tile::multiply(Tile::sources(w, x_row, w_row), 0, (w.cols + Tile::kColumns - 1) / Tile::kColumns,
                 s, sum);
#pragma unroll
  for (int m = 0; m < Tile::kMTiles; ++m)
#pragma unroll
    for (int n = 0; n < Tile::kNTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = Tile::first_token_of_warp() + m * 16 + threadIdx.x % 32 / 4 + i / 2 * 8;
        const int c = column + n * 8 + i % 2;
        if (row < rows.n && c < w.rows) a.out[(rows.first + row) * a.out_stride + c] = sum[m][n][i];
      }
}

// Divides each expert's rows into tiles. With slots, all experts have equally many tiles. Sorted
// rows have as many as needed, and block i takes the i-th; the lanes of a warp form a prefix sum.
__device__ RowTile row_tile_of_block(const ExpertRows& rows, int tile_rows) {
  const int block = blockIdx.x, lane = threadIdx.x % 32;
  if (rows.slots > 0) {
    const int each = (rows.slots + tile_rows - 1) / tile_rows, expert = block / each;
    const int first = block % each * tile_rows;
    const int n = min(rows.counts[expert] - first, tile_rows);
    return {expert, expert * rows.slots + first, max(n, 0)};
  }
  int before = 0;  // tiles of experts before these 32
  for (int base = 0; base < rows.n_experts; base += 32) {
    const int expert = min(base + lane, rows.n_experts - 1);
    const int begin = rows.offsets[expert], end = rows.offsets[expert + 1];
    const int own = base + lane < rows.n_experts ? (end - begin + tile_rows - 1) / tile_rows : 0;
    int upto = own;  // tiles of lanes up to this one
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_sync(~0u, upto, max(lane - d, 0));
      if (lane >= d) upto += other;
    }
    const int first = begin + (block - before - (upto - own)) * tile_rows;
    const bool here = block >= before + upto - own && block < before + upto;
    const unsigned found = __ballot_sync(~0u, here);
    if (found) {
      const int source = __ffs(found) - 1;
      return {base + source, __shfl_sync(~0u, first, source),
              __shfl_sync(~0u, min(tile_rows, end - first), source)};
    }
    before += __shfl_sync(~0u, upto, 31);
  }
  return {0, 0, 0};
}

__device__ Weight weight_of(const ExpertWeights& w, int expert) {
  Weight own = w.first;
  own.data = static_cast<const uint8_t*>(own.data) + expert * w.weight_stride;
  own.scale += expert * w.scale_stride;
  return own;
}

// An upper bound for any routing: every tile has a row, and only the last of each expert is not
// full.
int n_tiles_of(const ExpertRows& rows, int tile_rows) {
  if (rows.slots > 0) return rows.n_experts * ((rows.slots + tile_rows - 1) / tile_rows);
  return min(rows.max_rows, rows.n_experts + rows.max_rows / tile_rows);
}

template <class Tile, class Args>
void launch_tile(void (*kernel)(Args), int columns, int columns_of_tile, const Stream& stream,
                 const Args& a) {
  launch(kernel,
         {.grid_x = n_tiles_of(a.rows, Tile::kTokens),
          .grid_y = (columns + columns_of_tile - 1) / columns_of_tile,
          .threads = Tile::kThreads,
          .shared_bytes = sizeof(typename Tile::Shared)},
         stream, a);
}

}  // namespace

int grouped_tile_rows(const ExpertRows& rows) {
  if (rows.slots > 0) return tile_tokens_for(rows.slots);
  return tile_tokens_for(rows.usual_rows > 0 ? rows.usual_rows : rows.max_rows / rows.n_experts);
}

void grouped_gate_up(const Stream& stream, const GateUpArgs& a) {
  with_tile(a.gate.first, a.x_fp8, grouped_tile_rows(a.rows), [&]<class Tile>() {
    launch_tile<Tile>(gate_up_kernel<Tile>, static_cast<int>(a.hidden_stride), Tile::kRows / 2,
                      stream, a);
  });
}

void grouped_down(const Stream& stream, const GroupedDownArgs& a) {
  with_tile(a.down.first, a.hidden_fp8, grouped_tile_rows(a.rows), [&]<class Tile>() {
    launch_tile<Tile>(down_kernel<Tile>, a.down.first.rows, Tile::kRows, stream, a);
  });
}

}  // namespace tandem::gpu
