// One block normalizes one row, after it has added another row to it. It reads the row twice; the
// second read hits the cache.
#include "device.h"
#include "gpu_kernels/kernels.h"
#include "gpu_kernels/reduce.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) rms_norm_kernel(const __grid_constant__ RmsNormArgs a) {
  float* const x = a.x.data + blockIdx.x * a.x.stride;
  const float* const delta = a.delta.data ? a.delta.data + blockIdx.x * a.delta.stride : nullptr;
  float* const out = a.out.data + blockIdx.x * a.out.stride;
  float squares = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < a.dim; i += kThreads) {
    float v = x[i];
    if (delta) x[i] = v += delta[i];
    squares += v * v;
  }
  const float sum = block_sum<kThreads>(squares, shared_memory<BlockSums>());
  const float scale = 1 / sqrtf(sum / a.dim + a.eps);
#pragma unroll 4
  for (int i = threadIdx.x; i < a.dim; i += kThreads) out[i] = x[i] * scale * a.gain[i];
}

}  // namespace

void rms_norm(const Stream& stream, const RmsNormArgs& a) {
  if (a.rows == 0) return;
  launch(rms_norm_kernel,
         {.grid_x = a.rows, .threads = kThreads, .shared_bytes = sizeof(BlockSums)}, stream, a);
}

}  // namespace tandem::gpu
