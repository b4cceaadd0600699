// One block per token, one warp per 128 latents.
#include "core/invariant.h"
#include "device.h"
#include "gpu_kernels/attention.h"
#include "gpu_kernels/e4m3.h"
#include "gpu_kernels/reduce.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = kMaxKvRank / 4, kMaxRope = kMaxCacheDim - kMaxKvRank;

__global__ void __launch_bounds__(kThreads)
    append_fp8_kernel(const __grid_constant__ AppendFp8Args a) {
  const float* const kv = a.kv + blockIdx.x * a.kv_stride;
  auto* const out =
      static_cast<uint8_t*>(a.cache) + int64_t{a.rows_of_cache[blockIdx.x]} * kFp8TokenBytes;
  const int first = threadIdx.x * 4, block = threadIdx.x / 32;
  float v[4], largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = first + i < a.kv_rank ? kv[first + i] : 0;
    largest = fmaxf(largest, e4m3_magnitude(v[i]));
  }
  largest = warp_max(largest);
  const float scale = e4m3_scale(largest);
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) codes |= to_e4m3(v[i], scale) << 8 * i;
  reinterpret_cast<uint32_t*>(out)[threadIdx.x] = codes;
  if (threadIdx.x % 32 == 0) reinterpret_cast<float*>(out + kMaxKvRank)[block] = scale;
  if (threadIdx.x < kMaxRope)
    reinterpret_cast<bf16*>(out + kMaxKvRank + kMaxKvRank / 128 * 4)[threadIdx.x] =
        to_bf16(static_cast<int>(threadIdx.x) < a.rope_dim ? kv[a.kv_rank + threadIdx.x] : 0);
}

}  // namespace

void append_fp8(const Stream& stream, const AppendFp8Args& a) {
  check(a.kv_rank <= kMaxKvRank && a.rope_dim <= kMaxRope, "dimensions of an FP8 cache");
  if (a.tokens > 0) launch(append_fp8_kernel, {.grid_x = a.tokens, .threads = kThreads}, stream, a);
}

}  // namespace tandem::gpu
