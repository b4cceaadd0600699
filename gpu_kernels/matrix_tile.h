// A block's tile of x w^T on tensor cores: x and w come through several stages of shared memory by
// cp.async, FP8 is decoded in registers. What is a row of x and of w is the caller's business.
#pragma once
#include "device.h"
#include "gpu_kernels/e4m3.h"
#include "gpu_kernels/products.h"

namespace tandem::gpu {

// Eight warps, kWarpsM of them one below the other; each has kMTiles x kNTiles products of 16
// tokens by 8 rows of w. In every 64 columns, lane l multiplies columns 16 (l % 4) to 16 (l % 4) +
// 15 of x with the same ones of w: mma sums over columns in any order, and so a lane's columns are
// contiguous.
template <Number kNumber, int kWarpsM, int kMTilesOfWarp, int kNTilesOfWarp>
struct MatrixTile {
  static constexpr Number kType = kNumber;
  static constexpr int kMTiles = kMTilesOfWarp, kNTiles = kNTilesOfWarp;
  static constexpr int kThreads = 256, kWarpsN = 8 / kWarpsM;
  static constexpr int kTokens = kWarpsM * kMTiles * 16;
  static constexpr int kRows = kWarpsN * kNTiles * 8;  // of w
  static constexpr int kColumns = 64;                  // of a stage
  static constexpr int kNumbers = 16 / bytes_of(kType);
  static constexpr int kXChunks = 8, kWChunks = kColumns / kNumbers;  // of 16 bytes, a row
  static constexpr int kXLoads = kTokens * kXChunks / kThreads;
  static constexpr int kWLoads = kRows * kWChunks / kThreads;
  static constexpr int kStageBytes = 16 * (kTokens * kXChunks + kRows * kWChunks);
  static constexpr int kStages = kStageBytes > 24 * 1024 ? 3 : 4;  // 99 KB at most

  struct Shared {
    uint4 x[kStages][kTokens * kXChunks];
    uint4 w[kStages][kRows * kWChunks];
  };
  // Where this thread's chunks of a stage come from, without the column; null: zeros.
  struct Sources {
    const bf16* x[kXLoads];
    const uint8_t* w[kWLoads];
    int columns;
  };
  // Element i of [m][n]: token 16 m + lane / 4 + i / 2 * 8 of the warp, row 8 n + lane % 4 * 2 + i
  // % 2 of the warp.
  using Sums = float[kMTiles][kNTiles][4];

  __device__ static int x_row_of_load(int load) {
    return (load * kThreads + threadIdx.x) / kXChunks;
  }
  __device__ static int w_row_of_load(int load) {
    return (load * kThreads + threadIdx.x) / kWChunks;
  }
  __device__ static int first_token_of_warp() { return threadIdx.x / 32 / kWarpsN * kMTiles * 16; }
  __device__ static int first_row_of_warp() { return threadIdx.x / 32 % kWarpsN * kNTiles * 8; }

  // Eight lanes of a phase read chunks 2 t + p of two neighbouring rows: odd rows exchange
  // neighbours.
  template <int kChunks>
  __device__ static int place(int row, int chunk) {
    return row * kChunks + (kChunks == 8 ? chunk ^ (row & 1) : chunk);
  }

  __device__ static void load(const Sources& from, int step, Shared& s) {
    const int stage = step % kStages, first = step * kColumns;
#pragma unroll
    for (int i = 0; i < kXLoads; ++i) {
      const int chunk = threadIdx.x % kXChunks, column = first + chunk * 8;
      const bool valid = from.x[i] && column < from.columns;
      cp_async_16(&s.x[stage][place<kXChunks>(x_row_of_load(i), chunk)],
                  valid ? from.x[i] + column : nullptr, valid);
    }
#pragma unroll
    for (int i = 0; i < kWLoads; ++i) {
      const int chunk = threadIdx.x % kWChunks, column = first + chunk * kNumbers;
      const bool valid = from.w[i] && column < from.columns;
      cp_async_16(&s.w[stage][place<kWChunks>(w_row_of_load(i), chunk)],
                  valid ? from.w[i] + column * bytes_of(kType) : nullptr, valid);
    }
  }

  // Steps [first, end) of 64 columns. scale_of(n, e, step) is that of row 8 n + lane % 4 * 2 + e of
  // the warp; sums are scaled whenever it changes, after scale_steps steps.
  template <class ScaleOf>
  __device__ static void multiply(const Sources& from, int first, int end, int scale_steps,
                                  const ScaleOf& scale_of, Shared& s, Sums& sum) {
    Sums part = {};
    for (int i = 0; i < kStages - 1; ++i) {
      if (first + i < end) load(from, first + i, s);
      cp_async_commit();
    }
    for (int step = first; step < end; ++step) {
      cp_async_wait<kStages - 2>();
      __syncthreads();
      if (step + kStages - 1 < end) load(from, step + kStages - 1, s);
      cp_async_commit();
      if constexpr (kType == Number::kF8E4M3) {
        multiply_stage(s, step % kStages, part);
        if ((step + 1) % scale_steps == 0 || step + 1 == end) add_scaled(step, scale_of, part, sum);
      } else {
        multiply_stage(s, step % kStages, sum);
      }
    }
    cp_async_wait<0>();
  }

  __device__ static void multiply_stage(const Shared& s, int stage, Sums& sum) {
    const int lane = threadIdx.x % 32;
    uint4 codes[kNTiles];
    if constexpr (kType == Number::kF8E4M3)
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
        codes[n] = s.w[stage][place<kWChunks>(first_row_of_warp() + n * 8 + lane / 4, lane % 4)];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int chunk = lane % 4 * 2 + half;
      uint4 x[kMTiles][2];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          x[m][i] =
              s.x[stage][place<kXChunks>(first_token_of_warp() + m * 16 + lane / 4 + i * 8, chunk)];
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        uint4 w;
        if constexpr (kType == Number::kF8E4M3) {
          widen_e4m3(half ? codes[n].z : codes[n].x, w.x, w.y);
          widen_e4m3(half ? codes[n].w : codes[n].y, w.z, w.w);
        } else {
          w = s.w[stage][place<kWChunks>(first_row_of_warp() + n * 8 + lane / 4, chunk)];
        }
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          mma_m16n8k16(sum[m][n], {x[m][0].x, x[m][1].x, x[m][0].y, x[m][1].y}, w.x, w.y);
          mma_m16n8k16(sum[m][n], {x[m][0].z, x[m][1].z, x[m][0].w, x[m][1].w}, w.z, w.w);
        }
      }
    }
  }

  template <class ScaleOf>
  __device__ static void add_scaled(int step, const ScaleOf& scale_of, Sums& part, Sums& sum) {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      const float scale[2] = {scale_of(n, 0, step), scale_of(n, 1, step)};
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[m][n][i] += scale[i % 2] * part[m][n][i];
          part[m][n][i] = 0;
        }
    }
  }
};

// Rows of w that do not exist have the scale of the last one.
__device__ inline float scale_at(const Weight& w, int row, int column) {
  return w.scale[(w.row0 + min(row, w.rows - 1)) / w.block_rows * w.scale_stride +
                 column / w.block_cols];
}

}  // namespace tandem::gpu
