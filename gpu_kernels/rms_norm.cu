// One block normalizes one row, after it has added another row to it. It reads the row twice; the
// second read hits the cache. Numbers are loaded kEach at a time before any is stored, because
// ptxas moves no load above a store that may be to the same address.
#include "device.h"
#include "gpu_kernels/kernels.h"
#include "gpu_kernels/reduce.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256, kEach = 8;

__global__ void __launch_bounds__(kThreads, 2)
    rms_norm_kernel(const __grid_constant__ RmsNormArgs a) {
  begin_early();
  float* const x = a.x.data + blockIdx.x * a.x.stride;
  const float* const delta = a.delta.data ? a.delta.data + blockIdx.x * a.delta.stride : nullptr;
  float* const out = a.out.data + blockIdx.x * a.out.stride;
  float squares = 0;
  for (int first = threadIdx.x; first < a.dim; first += kEach * kThreads) {
    float v[kEach] = {}, added[kEach] = {};
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (first + i * kThreads < a.dim) {
        v[i] = x[first + i * kThreads];
        if (delta) added[i] = delta[first + i * kThreads];
      }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      v[i] += added[i];
      if (delta && first + i * kThreads < a.dim) x[first + i * kThreads] = v[i];
      squares += v[i] * v[i];
    }
  }
  const float sum = block_sum<kThreads>(squares, shared_memory<BlockSums>());
  const float scale = 1 / sqrtf(sum / a.dim + a.eps);
  for (int first = threadIdx.x; first < a.dim; first += kEach * kThreads) {
    float v[kEach] = {};
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (first + i * kThreads < a.dim)
        v[i] = x[first + i * kThreads] * scale * a.gain[first + i * kThreads];
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (first + i * kThreads < a.dim) out[first + i * kThreads] = v[i];
  }
}

}  // namespace

void rms_norm(const Stream& stream, const RmsNormArgs& a) {
  if (a.rows == 0) return;
  launch(rms_norm_kernel,
         {.grid_x = a.rows, .threads = kThreads, .shared_bytes = sizeof(BlockSums), .early = true},
         stream, a);
}

}  // namespace tandem::gpu
