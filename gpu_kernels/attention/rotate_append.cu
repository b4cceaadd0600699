// The first block of a token writes its row of the cache; the others rotate its queries, a pair a
// thread at a time.
#include "core/invariant.h"
#include "device.h"
#include "gpu_kernels/attention/fp8_latents.h"
#include "gpu_kernels/kernels.h"
#include "gpu_kernels/products/pointwise.h"
#include "gpu_kernels/reduce.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = kFp8RowThreads;
constexpr int kEach = 4;  // pairs a thread rotates

__device__ float2 rotated_pair(const RotateAppendArgs& a, const float* row, int pair, int token) {
  return rotated(row[2 * pair], row[2 * pair + 1], a.positions[token], a.frequencies[pair],
                 a.amplitude);
}

// All pairs of a thread are loaded before one is stored, as in rms_norm.cu.
__device__ void rotate_queries(const RotateAppendArgs& a, int token) {
  const int n_pairs = a.rope_dim / 2, first = (blockIdx.x - 1) * kThreads * kEach + threadIdx.x;
  float* to[kEach];  // null: none
  float2 v[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = first + i * kThreads, head = at / n_pairs, pair = at % n_pairs;
    float* const row = a.q_rope.data + (int64_t{token} * a.n_heads + head) * a.q_rope.stride;
    to[i] = head < a.n_heads ? row + 2 * pair : nullptr;
    if (to[i]) v[i] = rotated_pair(a, row, pair, token);
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (to[i]) to[i][0] = v[i].x, to[i][1] = v[i].y;
}

__device__ void append_fp8(const RotateAppendArgs& a, const float* kv, float scale, int token) {
  auto* const row =
      static_cast<uint8_t*>(a.cache) + int64_t{a.rows_of_cache[token]} * kFp8TokenBytes;
  const int first = threadIdx.x * 4;
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    v[i] = first + i < a.kv_rank ? kv[first + i] * scale * a.gain[first + i] : 0;
  store_fp8_latents(v, row);
  const int pair = threadIdx.x;
  if (2 * pair >= kMaxFp8Rope) return;
  const float2 key =
      2 * pair < a.rope_dim ? rotated_pair(a, kv + a.kv_rank, pair, token) : make_float2(0, 0);
  fp8_row_key(row)[2 * pair] = to_bf16(key.x);
  fp8_row_key(row)[2 * pair + 1] = to_bf16(key.y);
}

__device__ void append_bf16(const RotateAppendArgs& a, const float* kv, float scale, int token) {
  bf16* const row = static_cast<bf16*>(a.cache) + int64_t{a.rows_of_cache[token]} * a.cache_stride;
  for (int i = threadIdx.x; i < a.kv_rank; i += kThreads)
    row[i] = to_bf16(kv[i] * scale * a.gain[i]);
  for (int pair = threadIdx.x; pair < a.rope_dim / 2; pair += kThreads) {
    const float2 key = rotated_pair(a, kv + a.kv_rank, pair, token);
    row[a.kv_rank + 2 * pair] = to_bf16(key.x);
    row[a.kv_rank + 2 * pair + 1] = to_bf16(key.y);
  }
}

__global__ void __launch_bounds__(kThreads, 8)
    rotate_append_kernel(const __grid_constant__ RotateAppendArgs a) {
  begin_early();
  const int token = blockIdx.y;
  if (blockIdx.x > 0) return rotate_queries(a, token);
  const float* const kv = a.kv.data + token * a.kv.stride;
  float squares = 0;
  for (int i = threadIdx.x; i < a.kv_rank; i += kThreads) squares += kv[i] * kv[i];
  const float sum = block_sum<kThreads>(squares, shared_memory<BlockSums>());
  const float scale = 1 / sqrtf(sum / a.kv_rank + a.eps);
  a.fp8 ? append_fp8(a, kv, scale, token) : append_bf16(a, kv, scale, token);
}

}  // namespace

void rotate_and_append(const Stream& stream, const RotateAppendArgs& a) {
  check(!a.fp8 || (a.kv_rank <= kMaxKvRank && a.rope_dim <= kMaxFp8Rope),
        "dimensions of an FP8 cache");
  const int pairs = a.n_heads * (a.rope_dim / 2), of_block = kThreads * kEach;
  for (int first = 0; first < a.tokens; first += kMaxGridYz) {
    RotateAppendArgs part = a;
    part.q_rope.data += int64_t{first} * a.n_heads * a.q_rope.stride;
    part.kv.data += first * a.kv.stride;
    part.positions += first;
    part.rows_of_cache += first;
    part.tokens = min(a.tokens - first, kMaxGridYz);
    launch(rotate_append_kernel,
           {.grid_x = 1 + (pairs + of_block - 1) / of_block,
            .grid_y = part.tokens,
            .threads = kThreads,
            .shared_bytes = sizeof(BlockSums),
            .early = true},
           stream, part);
  }
}

}  // namespace tandem::gpu
