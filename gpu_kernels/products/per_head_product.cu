// out[t, h] = x[t, h] w_h, summed over rows of w: a block decodes 64 rows of 128 columns to BF16 in
// shared memory, where ldmatrix transposes them. The scale of a row multiplies x before rounding.
#include "core/invariant.h"
#include "device.h"
#include "gpu_kernels/e4m3.h"
#include "gpu_kernels/products/skinny_per_head.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 16, kColumns = 128;  // per block; each warp has 16 columns
constexpr int kRows = 64;                    // rows of w at a time
constexpr int kPad = 8;                      // odd in 16-byte units: no bank conflicts

struct Shared {
  alignas(16) bf16 x[kTokens][kRows + kPad];
  alignas(16) bf16 w[kRows][kColumns + kPad];
};

// A thread loads 16 bytes of a row at a time, kLoads times.
template <Number kType>
struct Loaded {
  static constexpr int kPerRow = kColumns * int{bytes_of(kType)} / 16;
  static constexpr int kLoads = kRows * kPerRow / kThreads;
  uint4 word[kLoads];
};

template <Number kType>
__device__ void load_weights(const PerHeadArgs& a, int first_row, Loaded<kType>& out);
template <Number kType>
__device__ void stage_weights(const Loaded<kType>& loaded, Shared& s);
template <Number kType>
__device__ void stage_x(const PerHeadArgs& a, int first_row, Shared& s);
__device__ void multiply(const Shared& s, float (&sum)[2][4]);
__device__ void store(const PerHeadArgs& a, const float (&sum)[2][4]);

template <Number kType>
__global__ void __launch_bounds__(kThreads)
    per_head_transposed_kernel(const __grid_constant__ PerHeadArgs a) {
  auto& s = shared_memory<Shared>();
  Loaded<kType> loaded;
  float sum[2][4] = {};
  load_weights<kType>(a, 0, loaded);
  begin_early();  // weights were written long before
  for (int row = 0; row < a.x_cols; row += kRows) {
    stage_weights<kType>(loaded, s);
    stage_x<kType>(a, row, s);
    __syncthreads();
    if (row + kRows < a.x_cols) load_weights<kType>(a, row + kRows, loaded);
    multiply(s, sum);
    __syncthreads();
  }
  store(a, sum);
}

__device__ int row_of_head(const PerHeadArgs& a) {
  return a.first_row + blockIdx.y * a.rows_per_head;
}

template <Number kType>
__device__ void load_weights(const PerHeadArgs& a, int first_row, Loaded<kType>& out) {
  constexpr int kNumbers = 16 / bytes_of(kType);
#pragma unroll
  for (int i = 0; i < Loaded<kType>::kLoads; ++i) {
    const int at = i * kThreads + threadIdx.x, row = first_row + at / Loaded<kType>::kPerRow;
    const int column = blockIdx.x * kColumns + at % Loaded<kType>::kPerRow * kNumbers;
    const int64_t number = (row_of_head(a) + row) * a.w.stride + column;
    out.word[i] =
        row < a.x_cols && column < a.w.cols
            ? load_once_16(static_cast<const uint8_t*>(a.w.data) + number * bytes_of(kType))
            : uint4{0, 0, 0, 0};
  }
}

template <Number kType>
__device__ void stage_weights(const Loaded<kType>& loaded, Shared& s) {
#pragma unroll
  for (int i = 0; i < Loaded<kType>::kLoads; ++i) {
    const int at = i * kThreads + threadIdx.x, row = at / Loaded<kType>::kPerRow;
    const int part = at % Loaded<kType>::kPerRow;
    const uint4 v = loaded.word[i];
    if constexpr (kType == Number::kF8E4M3) {
      uint4 low, high;
      widen_e4m3(v.x, low.x, low.y);
      widen_e4m3(v.y, low.z, low.w);
      widen_e4m3(v.z, high.x, high.y);
      widen_e4m3(v.w, high.z, high.w);
      *reinterpret_cast<uint4*>(&s.w[row][part * 16]) = low;
      *reinterpret_cast<uint4*>(&s.w[row][part * 16 + 8]) = high;
    } else {
      *reinterpret_cast<uint4*>(&s.w[row][part * 8]) = v;
    }
  }
}

// Rows of missing tokens are not written: they do not affect other sums.
template <Number kType>
__device__ void stage_x(const PerHeadArgs& a, int first_row, Shared& s) {
  const int first_token = blockIdx.z * kTokens, n = min(kTokens, a.n_tokens - first_token);
  const float* const scales = a.w.scale + blockIdx.x * kColumns / a.w.block_cols;
  for (int i = threadIdx.x; i < n * kRows; i += kThreads) {
    const int token = first_token + i / kRows, row = first_row + i % kRows;
    float v = 0;
    if (row < a.x_cols) {
      v = a.x[(int64_t{token} * a.n_heads + blockIdx.y) * a.x_stride + row];
      if constexpr (kType == Number::kF8E4M3)
        v *= scales[(a.w.row0 + row_of_head(a) + row) / a.w.block_rows * a.w.scale_stride];
    }
    s.x[i / kRows][i % kRows] = to_bf16(v);
  }
}

__device__ void multiply(const Shared& s, float (&sum)[2][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kRows; k += 16) {
    uint32_t x[4], w[4];
    ldmatrix_x4(x, &s.x[lane % 16][k + lane / 16 * 8]);
    ldmatrix_x4_trans(w, &s.w[k + lane % 16][warp * 16 + lane / 16 * 8]);
    mma_m16n8k16(sum[0], x, w[0], w[1]);
    mma_m16n8k16(sum[1], x, w[2], w[3]);
  }
}

__device__ void store(const PerHeadArgs& a, const float (&sum)[2][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int token = blockIdx.z * kTokens + lane / 4 + i % 4 / 2 * 8;
    const int column = blockIdx.x * kColumns + warp * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (token < a.n_tokens && column < a.out_cols)
      a.out[(int64_t{token} * a.n_heads + blockIdx.y) * a.out_stride + column] = sum[i / 4][i % 4];
  }
}

}  // namespace

void per_head_product(const Stream& stream, const PerHeadArgs& a) {
  if (!a.transposed) return skinny_per_head(stream, a);
  check(a.parts.n == 0, "parts of per_head_product");
  const bool fp8 = a.w.type == Number::kF8E4M3;
  check(fp8 || a.w.type == Number::kBF16, "weights of per_head_product");
  check(!fp8 || a.w.block_cols % kColumns == 0, "scale blocks of per_head_product");
  launch(
      fp8 ? per_head_transposed_kernel<Number::kF8E4M3> : per_head_transposed_kernel<Number::kBF16>,
      {.grid_x = (a.out_cols + kColumns - 1) / kColumns,
       .grid_y = a.n_heads,
       .grid_z = (a.n_tokens + kTokens - 1) / kTokens,
       .threads = kThreads,
       .shared_bytes = sizeof(Shared),
       .early = true},
      stream, a);
}

}  // namespace tandem::gpu
