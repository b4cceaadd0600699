// One block per row.
#include "device.h"
#include "gpu_kernels/exchange.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ PackRowsArgs a) {
  const int64_t row = blockIdx.x;
  float* const out = a.out.data + row * a.out.stride;
  int32_t* const ids = reinterpret_cast<int32_t*>(out + a.dim);
  const bool is_token = row < a.tokens;
  if (is_token)
    for (int c = threadIdx.x; c < a.dim; c += kThreads) out[c] = a.x.data[row * a.x.stride + c];
  for (int i = threadIdx.x; i < a.n_active; i += kThreads) {
    ids[i] = is_token ? a.ids[row * a.ids_stride + i] : -1;
    out[a.dim + a.n_active + i] = is_token ? a.weights.data[row * a.weights.stride + i] : 0;
  }
}

}  // namespace

void pack_rows(const Stream& stream, const PackRowsArgs& a) {
  if (a.rows > 0) launch(pack_kernel, {.grid_x = a.rows, .threads = kThreads}, stream, a);
}

}  // namespace tandem::gpu
