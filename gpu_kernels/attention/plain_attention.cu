#include "device.h"
#include "gpu_kernels/attention/plain_attention.h"
#include "gpu_kernels/reduce.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 128;  // also the keys of a tile
constexpr int kColumns = kMaxPlainRank / kThreads;

struct Shared {
  float q[kMaxPlainDim];
  float p[kThreads];
  const bf16* key[kThreads];
  BlockSums sums, maxima;
};

__device__ float block_max(float v, BlockSums& s) {
  v = warp_max(v);
  if (threadIdx.x % 32 == 0) s.of_warp[threadIdx.x / 32] = v;
  __syncthreads();
  float max = -INFINITY;
  for (int warp = 0; warp < kThreads / 32; ++warp) max = fmaxf(max, s.of_warp[warp]);
  return max;
}

__device__ float dot(const float* q, const bf16* key, int dim) {
  float sum = 0;
  for (int i = 0; i < dim; ++i) sum += q[i] * to_float(key[i]);
  return sum;
}

// A thread scores one key of a tile, then sums columns threadIdx.x, threadIdx.x + 128, .. over all
// keys.
__global__ void __launch_bounds__(kThreads)
    plain_attention_kernel(const __grid_constant__ PlainAttentionArgs a) {
  Shared& s = shared_memory<Shared>();
  const int token = a.first_token + static_cast<int>(blockIdx.x) / a.n_heads, me = threadIdx.x;
  const int64_t row = blockIdx.x;
  const int dim = a.rank + a.rope_dim, n_keys = a.at.places[token] + 1;
  const int32_t* pages = a.at.pages + a.at.sequence_of[token] * a.at.pages_stride;
  for (int i = me; i < dim; i += kThreads)
    s.q[i] = i < a.rank ? a.q.data[row * a.q.stride + i]
                        : a.q_rope.data[row * a.q_rope.stride + i - a.rank];
  float acc[kColumns] = {}, max = -INFINITY, sum = 0;
  for (int first = 0; first < n_keys; first += kThreads) {
    const int n_here = min(kThreads, n_keys - first), position = first + me;
    __syncthreads();
    float score = -INFINITY;
    if (me < n_here) {
      const int64_t page = pages[position / a.at.page_size];
      s.key[me] = a.cache + (page * a.at.page_size + position % a.at.page_size) * a.cache_stride;
      score = dot(s.q, s.key[me], dim) * a.scale;
    }
    const float top = fmaxf(max, block_max(score, s.maxima));
    const float p = expf(score - top), rescale = expf(max - top);
    s.p[me] = p;
    sum = sum * rescale + block_sum<kThreads>(p, s.sums);
    max = top;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = me + i * kThreads;
      if (column >= a.rank) continue;
      float tile = 0;
      for (int k = 0; k < n_here; ++k) tile += s.p[k] * to_float(s.key[k][column]);
      acc[i] = acc[i] * rescale + tile;
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    if (me + i * kThreads < a.rank)
      a.out.data[row * a.out.stride + me + i * kThreads] = acc[i] / sum;
}

}  // namespace

void plain_attention(const Stream& stream, const PlainAttentionArgs& a) {
  if (a.n_tokens == 0) return;
  launch(plain_attention_kernel,
         {.grid_x = a.n_tokens * a.n_heads, .threads = kThreads, .shared_bytes = sizeof(Shared)},
         stream, a);
}

}  // namespace tandem::gpu
