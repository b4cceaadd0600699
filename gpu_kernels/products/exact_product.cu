// Float products, for matrices that tensor cores do not support. A block computes 4 rows of w for 8
// tokens.
#include "core/invariant.h"
#include "device.h"
#include "gpu_kernels/products/exact_tile.h"

namespace tandem::gpu {
namespace {

using namespace exact;

template <Number kType>
__global__ void __launch_bounds__(kThreads) exact_kernel(const __grid_constant__ ExactArgs a) {
  auto& s = shared_memory<Shared>();
  const int first_row = blockIdx.x * kRows, first_token = blockIdx.y * kTokens;
  const float total = sums_of_block<kType>(a, first_row, first_token, 0, a.w.cols, s);
  const int row = first_row + threadIdx.x / kTokens, token = first_token + threadIdx.x % kTokens;
  if (threadIdx.x < 32 && row < a.w.rows && token < a.n_tokens)
    a.out[token * a.out_stride + row] = total;
}

}  // namespace

void exact_product(const Stream& stream, const ExactArgs& a) {
  check(a.w.type != Number::kF8E4M3 || a.w.block_cols % 4 == 0, "scale blocks of exact_product");
  launch(a.w.type == Number::kF32    ? exact_kernel<Number::kF32>
         : a.w.type == Number::kBF16 ? exact_kernel<Number::kBF16>
                                     : exact_kernel<Number::kF8E4M3>,
         {.grid_x = (a.w.rows + kRows - 1) / kRows,
          .grid_y = (a.n_tokens + kTokens - 1) / kTokens,
          .threads = kThreads,
          .shared_bytes = sizeof(Shared)},
         stream, a);
}

}  // namespace tandem::gpu
