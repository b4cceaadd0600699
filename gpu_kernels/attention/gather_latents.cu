#include "device.h"
#include "gpu_kernels/attention/latents.h"
#include "gpu_kernels/e4m3.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = kMaxKvRank / 16;

// Eight columns of a token as BF16.
__device__ uint4 latents_of(const GatherLatentsArgs& a, const uint8_t* token, int column) {
  const int rank = a.cache.kv_rank;
  if (column >= rank) return {0, 0, 0, 0};
  uint4 v;
  if (a.cache.fp8) {
    const uint2 codes = *reinterpret_cast<const uint2*>(token + column);
    const float scale = reinterpret_cast<const float*>(token + kMaxKvRank)[column / 128];
    widen_e4m3(codes.x, v.x, v.y);
    widen_e4m3(codes.y, v.z, v.w);
    for (uint32_t* pair : {&v.x, &v.y, &v.z, &v.w})
      *pair = pack_bf16(bf16_low(*pair) * scale, bf16_high(*pair) * scale);
    return v;
  }
  v = *reinterpret_cast<const uint4*>(token + 2 * column);
  const auto pair = [&](uint32_t bits, int first) { return first < rank ? bits : 0; };
  return {pair(v.x, column), pair(v.y, column + 2), pair(v.z, column + 4), pair(v.w, column + 6)};
}

// One block per token, 16 columns per thread.
__global__ void __launch_bounds__(kThreads)
    gather_latents_kernel(const __grid_constant__ GatherLatentsArgs a) {
  const int token = blockIdx.x, column = threadIdx.x * 16;
  if (column >= a.out_stride) return;
  const uint8_t* from = token_bytes(a.cache, a.pages, token);
  const uint4 left = latents_of(a, from, column), right = latents_of(a, from, column + 8);
  auto* const out = reinterpret_cast<uint4*>(a.out + token * a.out_stride + column);
  out[0] = {left.x, left.z, right.x, right.z};
  out[1] = {left.y, left.w, right.y, right.w};
}

}  // namespace

void gather_latents(const Stream& stream, const GatherLatentsArgs& a) {
  launch(gather_latents_kernel, {.grid_x = a.n_tokens, .threads = kThreads}, stream, a);
}

}  // namespace tandem::gpu
