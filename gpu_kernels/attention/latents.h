// Access to single tokens of the latent cache, in BF16 or FP8.
#pragma once
#include "device.h"
#include "gpu_kernels/attention/attention.h"

namespace tandem::gpu {

__device__ inline const uint8_t* token_bytes(const LatentCache& c, const int32_t* pages,
                                             int token) {
  const int64_t row = int64_t{pages[token / kPageTokens]} * kPageTokens + token % kPageTokens;
  return static_cast<const uint8_t*>(c.data) + row * (c.fp8 ? kFp8TokenBytes : 2 * c.stride);
}

__device__ inline const bf16* rope_key(const LatentCache& c, const int32_t* pages, int token) {
  const int latent_bytes = c.fp8 ? kMaxKvRank + kMaxKvRank / 128 * 4 : 2 * c.kv_rank;
  return reinterpret_cast<const bf16*>(token_bytes(c, pages, token) + latent_bytes);
}

// Gathers the latents of the first n_tokens tokens in the layout of round_rows(). The rank is even.
struct GatherLatentsArgs {
  LatentCache cache;
  const int32_t* pages;
  bf16* out;           // [n_tokens, out_stride]
  int64_t out_stride;  // a multiple of 16
  int n_tokens;
};
void gather_latents(const Stream& stream, const GatherLatentsArgs& args);

}  // namespace tandem::gpu
