// A block looks through a row.
#include "device.h"
#include "gpu_kernels/kernels.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 1024;

struct Shared {
  float value[kThreads];
  int at[kThreads];
};

__global__ void __launch_bounds__(kThreads) argmax_kernel(const __grid_constant__ ArgmaxArgs a) {
  Shared& s = shared_memory<Shared>();
  const float* x = a.x.data + blockIdx.x * a.x.stride;
  const int me = threadIdx.x;
  int best = min(me, a.cols - 1);
  for (int i = me + kThreads; i < a.cols; i += kThreads)
    if (x[i] > x[best]) best = i;
  s.value[me] = x[best];
  s.at[me] = best;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (me >= half) continue;
    const float other = s.value[me + half];
    if (other < s.value[me] || (other == s.value[me] && s.at[me] < s.at[me + half])) continue;
    s.value[me] = other;
    s.at[me] = s.at[me + half];
  }
  if (me == 0) a.out[blockIdx.x] = s.at[0];
}

}  // namespace

void argmax(const Stream& stream, const ArgmaxArgs& a) {
  if (a.rows == 0) return;
  launch(argmax_kernel, {.grid_x = a.rows, .threads = kThreads, .shared_bytes = sizeof(Shared)},
         stream, a);
}

}  // namespace tandem::gpu
