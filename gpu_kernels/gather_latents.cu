#include "device.h"
#include "gpu_kernels/e4m3.h"
#include "gpu_kernels/latents.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 128;

// A block has one token, a thread 8 columns.
__global__ void __launch_bounds__(kThreads)
    gather_latents_kernel(const __grid_constant__ GatherLatentsArgs a) {
  const int token = blockIdx.x, rank = a.cache.kv_rank;
  const uint8_t* from = token_bytes(a.cache, a.pages, token);
  for (int column = threadIdx.x * 8; column < a.out_stride; column += kThreads * 8) {
    uint4 v;
    if (a.cache.fp8) {
      const uint2 codes = *reinterpret_cast<const uint2*>(from + column);
      const float scale = reinterpret_cast<const float*>(from + kMaxKvRank)[column / 128];
      widen_e4m3(codes.x, v.x, v.y);
      widen_e4m3(codes.y, v.z, v.w);
      for (uint32_t* pair : {&v.x, &v.y, &v.z, &v.w})
        *pair = pack_bf16(bf16_low(*pair) * scale, bf16_high(*pair) * scale);
    } else {
      v = *reinterpret_cast<const uint4*>(from + 2 * column);
      const auto pair = [&](uint32_t bits, int first) {
        return first + 2 <= rank ? bits : first < rank ? bits & 0xffff : 0;
      };
      v = {pair(v.x, column), pair(v.y, column + 2), pair(v.z, column + 4), pair(v.w, column + 6)};
    }
    *reinterpret_cast<uint4*>(a.out + token * a.out_stride + column) = v;
  }
}

}  // namespace

void gather_latents(const Stream& stream, const GatherLatentsArgs& a) {
  launch(gather_latents_kernel, {.grid_x = a.n_tokens, .threads = kThreads}, stream, a);
}

}  // namespace tandem::gpu
