// A block's tile of x w^T on tensor cores. x and w pass through several stages of shared memory
// with cp.async. FP8 weights are decoded in registers for BF16 x, and multiplied directly with FP8
// x. The caller defines the rows of x and of w.
#pragma once
#include "core/invariant.h"
#include "device.h"
#include "gpu_kernels/e4m3.h"
#include "gpu_kernels/products/products.h"
#include "packed.h"

namespace tandem::gpu {

// Eight warps, kWarpsM of them along the tokens. Each computes kMTiles x kNTiles products of 16
// tokens by 8 rows of w. Of every 16 columns, lane l multiplies 4 (l % 4) to 4 (l % 4) + 3: one
// word of FP8. BF16 x has its columns in the order of product_column(), which gives each lane these
// columns.
template <Number kXNumber, Number kNumber, int kWarpsM, int kMTilesOfWarp, int kNTilesOfWarp>
struct MatrixTile {
  static constexpr Number kXType = kXNumber, kType = kNumber;
  static constexpr bool kFp8X = kXType == Number::kF8E4M3;
  static_assert(!kFp8X || kType == Number::kF8E4M3);
  static constexpr int kMTiles = kMTilesOfWarp, kNTiles = kNTilesOfWarp;
  static constexpr int kThreads = 256, kWarpsN = 8 / kWarpsM;
  static constexpr int kTokens = kWarpsM * kMTiles * 16;
  static constexpr int kRows = kWarpsN * kNTiles * 8;  // rows of w
  static constexpr int kColumns = 64;                  // per step
  static constexpr int kXNumbers = 16 / bytes_of(kXType), kNumbers = 16 / bytes_of(kType);
  static constexpr int kXChunks = kColumns / kXNumbers;  // chunks of 16 bytes per row
  static constexpr int kWChunks = kColumns / kNumbers;
  static constexpr int kXLoads = (kTokens * kXChunks + kThreads - 1) / kThreads;
  static constexpr int kWLoads = kRows * kWChunks / kThreads;
  static constexpr int kStageBytes = 16 * (kTokens * kXChunks + kRows * kWChunks);
  // At most 97 KB per block; less for 64 tokens of FP8, so that two blocks fit 100 KB.
  static constexpr int kStages = kStageBytes > 24 * 1024 || (kFp8X && kTokens == 64) ? 3 : 4;
  static constexpr int kResident = kTokens > 64 ? 1 : 2;
  // Scales per block of columns: one per row of w and, if x is FP8, one per token.
  static constexpr int kScales = kRows + (kFp8X ? kTokens : 0);
  static_assert(kScales <= kThreads);

  struct Shared {
    uint4 x[kStages][kTokens * kXChunks];
    uint4 w[kStages][kRows * kWChunks];
    alignas(8) float scale[2][kScales];  // alternating blocks of columns
  };
  // Addresses of this thread's chunks in a step, including its own column. Missing rows are copies
  // of others; their results are not stored.
  struct Sources {
    const uint8_t* x[kXLoads];
    const uint8_t* w[kWLoads];
    const float* scale;  // element threadIdx.x of kScales, first block of columns
    int columns, n_blocks, block_steps;
  };
  // Element i of [m][n]: token 16 m + lane / 4 + i / 2 * 8 of the warp, row 8 n + lane % 4 * 2 + i
  // % 2 of the warp.
  using Sums = float[kMTiles][kNTiles][4];
  struct WeightRow {
    const Weight& of;
    int row;
  };
  struct XRow {
    const void* data;
    const float* scale;  // per block of columns, if x is FP8
  };

  // Row `row` of x or of fp8, whichever the tile multiplies.
  __device__ static XRow x_row(const bf16* x, int64_t stride, const Fp8Rows& fp8, int64_t row) {
    if constexpr (kFp8X)
      return {fp8.codes + row * fp8.stride, fp8.scales + row * fp8.scale_stride};
    else
      return {x + row * stride, nullptr};
  }

  __device__ static int first_token_of_warp() { return threadIdx.x / 32 / kWarpsN * kMTiles * 16; }
  __device__ static int first_row_of_warp() { return threadIdx.x / 32 % kWarpsN * kNTiles * 8; }

  // x_of(r) is the XRow and w_row(r) the WeightRow of the tile's row r.
  template <class XOf, class WRow>
  __device__ static Sources sources(const Weight& shape, const XOf& x_of, const WRow& w_row) {
    Sources from;
#pragma unroll
    for (int i = 0; i < kXLoads; ++i)
      from.x[i] =
          kept(static_cast<const uint8_t*>(x_of((i * kThreads + threadIdx.x) / kXChunks).data) +
               threadIdx.x % kXChunks * 16);
#pragma unroll
    for (int i = 0; i < kWLoads; ++i) {
      const WeightRow r = w_row((i * kThreads + threadIdx.x) / kWChunks);
      from.w[i] = kept(static_cast<const uint8_t*>(r.of.data) +
                       r.row * r.of.stride * bytes_of(kType) + threadIdx.x % kWChunks * 16);
    }
    from.columns = shape.cols;
    if constexpr (kType == Number::kF8E4M3) {
      const WeightRow r = w_row(threadIdx.x % kRows);
      from.scale = r.of.scale + (r.of.row0 + r.row) / r.of.block_rows * r.of.scale_stride;
      if constexpr (kFp8X)
        if (threadIdx.x >= kRows) from.scale = x_of((threadIdx.x - kRows) % kTokens).scale;
      from.n_blocks = (shape.cols + shape.block_cols - 1) / shape.block_cols;
      from.block_steps = shape.block_cols / kColumns;
    }
    return from;
  }

  // Multiplies steps [first, end) of 64 columns.
  __device__ static void multiply(const Sources& from, int first, int end, Shared& s, Sums& sum) {
    if constexpr (kType == Number::kF8E4M3)
      multiply_fp8(from, first, end, s, sum);
    else
      for_each_step(from, first, end, s, [&](int step) { multiply_stage(s, step % kStages, sum); });
  }

 private:
  template <class Multiply>
  __device__ static void for_each_step(const Sources& from, int first, int end, Shared& s,
                                       const Multiply& multiply) {
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
      if (first + i < end) load(from, first + i, s);
      cp_async_commit();
    }
    for (int step = first; step < end; ++step) {
      cp_async_wait<kStages - 2>();
      __syncthreads();
      if (step + kStages - 1 < end) load(from, step + kStages - 1, s);
      cp_async_commit();
      multiply(step);
    }
  }

  // Sums are scaled at the end of each block of columns. While a block is multiplied, the scales of
  // the next one are loaded.
  __device__ static void multiply_fp8(const Sources& from, int first, int end, Shared& s,
                                      Sums& sum) {
    Sums part = {};
    int block = first / from.block_steps, left = (block + 1) * from.block_steps - first;
    bool entered = true;
    if (threadIdx.x < kScales) s.scale[block % 2][threadIdx.x] = from.scale[block];
    for_each_step(from, first, end, s, [&](int step) {
      const bool carries = entered && threadIdx.x < kScales && block + 1 < from.n_blocks;
      const float next = carries ? from.scale[block + 1] : 0;
      if constexpr (kFp8X)
        multiply_codes(s, step % kStages, part);
      else
        multiply_stage(s, step % kStages, part);
      if (carries) s.scale[(block + 1) % 2][threadIdx.x] = next;
      entered = --left == 0;
      if (!entered && step + 1 < end) return;
      add_scaled(s.scale[block % 2], part, sum);
      ++block;
      left = from.block_steps;
    });
  }

  // Swizzles chunks so that the eight rows that ldmatrix reads at a time, or the four that other
  // loads read, lie in different banks.
  __device__ static int x_place(int row, int chunk) {
    return row * kXChunks + (kXChunks == 4 ? chunk ^ (row / 2 & 3) : chunk ^ (row & 7));
  }
  __device__ static int w_place(int row, int chunk) {
    return row * kWChunks + (kWChunks == 4 ? chunk ^ (row / 2 & 3) : chunk ^ (row & 3) * 2);
  }

  __device__ static void load(const Sources& from, int step, Shared& s) {
    const int stage = step % kStages, first = step * kColumns;
    const int x_chunk = threadIdx.x % kXChunks, w_chunk = threadIdx.x % kWChunks;
    const bool x_valid = first + x_chunk * kXNumbers / 16 * 16 < from.columns;
    const bool w_valid = first + w_chunk * kNumbers < from.columns;
    if (kTokens * kXChunks >= kThreads || threadIdx.x < kTokens * kXChunks) {
#pragma unroll
      for (int i = 0; i < kXLoads; ++i)
        cp_async_16(&s.x[stage][x_place((i * kThreads + threadIdx.x) / kXChunks, x_chunk)],
                    from.x[i] + first * bytes_of(kXType), x_valid);
    }
#pragma unroll
    for (int i = 0; i < kWLoads; ++i)
      cp_async_16(&s.w[stage][w_place((i * kThreads + threadIdx.x) / kWChunks, w_chunk)],
                  from.w[i] + first * bytes_of(kType), w_valid);
  }

  __device__ static void multiply_stage(const Shared& s, int stage, Sums& sum) {
    const int lane = threadIdx.x % 32;
    uint32_t codes[kNTiles][4];  // FP8, of four times 16 columns
    if constexpr (kType == Number::kF8E4M3) {
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
        ldmatrix_x4(codes[n],
                    reinterpret_cast<const bf16*>(
                        &s.w[stage][w_place(first_row_of_warp() + n * 8 + lane % 8, lane / 8)]));
    }
#pragma unroll
    for (int k = 0; k < kColumns / 16; ++k) {
      uint32_t x[kMTiles][4];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
        ldmatrix_x4(x[m], reinterpret_cast<const bf16*>(&s.x[stage][x_place(
                              first_token_of_warp() + m * 16 + lane % 16, 2 * k + lane / 16)]));
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        uint2 w;
        if constexpr (kType == Number::kF8E4M3) {
          widen_e4m3(codes[n][k], w.x, w.y);
        } else {
          const int row = first_row_of_warp() + n * 8 + lane / 4;
          w = reinterpret_cast<const uint2*>(
              &s.w[stage][w_place(row, 2 * k + lane % 4 / 2)])[lane % 2];
        }
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) mma_m16n8k16(sum[m][n], x[m], w.x, w.y);
      }
    }
  }

  // Multiplies FP8 x: 32 columns of all tokens and 16 rows of w at a time. Not unrolled: where FP8
  // mma is emulated by other instructions, unrolling would exceed the registers.
  __device__ static void multiply_codes(const Shared& s, int stage, Sums& sum) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int chunk = 0; chunk < kXChunks; chunk += 2) {
      uint32_t x[kMTiles][4];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
        ldmatrix_x4(x[m], reinterpret_cast<const bf16*>(&s.x[stage][x_place(
                              first_token_of_warp() + m * 16 + lane % 16, chunk + lane / 16)]));
#pragma unroll
      for (int n = 0; n < kNTiles; n += 2) {
        uint32_t w[4];
        const int row = first_row_of_warp() + n * 8 + lane / 16 * 8 + lane % 8;
        ldmatrix_x4(w,
                    reinterpret_cast<const bf16*>(&s.w[stage][w_place(row, chunk + lane / 8 % 2)]));
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          mma_m16n8k32_e4m3(sum[m][n], x[m], w[0], w[1]);
          mma_m16n8k32_e4m3(sum[m][n + 1], x[m], w[2], w[3]);
        }
      }
    }
  }

  __device__ static void add_scaled(const float* scales, Sums& part, Sums& sum) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      const int row = first_row_of_warp() + n * 8 + lane % 4 * 2;
      const float2 of_row = *reinterpret_cast<const float2*>(scales + row);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (kFp8X)
            part[m][n][i] *= scales[kRows + first_token_of_warp() + m * 16 + i / 2 * 8 + lane / 4];
          sum[m][n][i] += (i % 2 ? of_row.y : of_row.x) * part[m][n][i];
          part[m][n][i] = 0;
        }
    }
  }
};

// The tile size in tokens that n tokens fill best.
inline int tile_tokens_for(int n) { return n <= 32 ? 32 : n <= 64 ? 64 : 128; }

// Calls run<Tile>() with the tile of 32, 64 or 128 tokens for x and weights of these types.
template <Number kXType, Number kType, class Run>
void with_tile_of(int tokens, const Run& run) {
  if (tokens == 32) return run.template operator()<MatrixTile<kXType, kType, 1, 2, 2>>();
  if (tokens == 64) return run.template operator()<MatrixTile<kXType, kType, 2, 2, 4>>();
  run.template operator()<MatrixTile<kXType, kType, 2, 4, 4>>();
}

// Likewise for weights w, FP8 or BF16, and x in FP8 if given, otherwise in BF16.
template <class Run>
void with_tile(const Weight& w, const Fp8Rows& x, int tokens, const Run& run) {
  if (x.codes) {
    check(takes_fp8_rows(w), "weights that multiply activations in FP8");
    return with_tile_of<Number::kF8E4M3, Number::kF8E4M3>(tokens, run);
  }
  check(w.type == Number::kBF16 || (w.type == Number::kF8E4M3 && w.block_cols % 64 == 0),
        "weights on tensor cores");
  w.type == Number::kF8E4M3 ? with_tile_of<Number::kBF16, Number::kF8E4M3>(tokens, run)
                            : with_tile_of<Number::kBF16, Number::kBF16>(tokens, run);
}

}  // namespace tandem::gpu
