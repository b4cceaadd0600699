// One block per token.
#include "core/invariant.h"
#include "device.h"
#include "gpu_kernels/attention/attention.h"
#include "gpu_kernels/attention/fp8_latents.h"

namespace tandem::gpu {
namespace {

__global__ void __launch_bounds__(kFp8RowThreads)
    append_fp8_kernel(const __grid_constant__ AppendFp8Args a) {
  const float* const kv = a.kv + blockIdx.x * a.kv_stride;
  auto* const row =
      static_cast<uint8_t*>(a.cache) + int64_t{a.rows_of_cache[blockIdx.x]} * kFp8TokenBytes;
  const int first = threadIdx.x * 4;
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = first + i < a.kv_rank ? kv[first + i] : 0;
  store_fp8_latents(v, row);
  if (threadIdx.x < kMaxFp8Rope)
    fp8_row_key(row)[threadIdx.x] =
        to_bf16(static_cast<int>(threadIdx.x) < a.rope_dim ? kv[a.kv_rank + threadIdx.x] : 0);
}

}  // namespace

void append_fp8(const Stream& stream, const AppendFp8Args& a) {
  check(a.kv_rank <= kMaxKvRank && a.rope_dim <= kMaxFp8Rope, "dimensions of an FP8 cache");
  if (a.tokens > 0)
    launch(append_fp8_kernel, {.grid_x = a.tokens, .threads = kFp8RowThreads}, stream, a);
}

}  // namespace tandem::gpu
