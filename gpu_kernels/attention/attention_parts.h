// Joins what several blocks found of the same rows of attention, each from its share of the
// context.
#pragma once
#include "device.h"
#include "gpu_kernels/products/products.h"
#include "gpu_kernels/reduce.h"

namespace tandem::gpu {

constexpr int kJoinThreads = 256;
constexpr int kJoinQuads = kMaxJoinedCols / 4;          // columns are taken by fours
constexpr int kJoinGroups = kJoinThreads / kJoinQuads;  // of threads, for every second part
constexpr int kPartsAtOnce = 12;  // that a thread loads: 66 parts are three rounds of two groups

__host__ __device__ constexpr int padded_parts(int n) {
  constexpr int kRound = kJoinGroups * kPartsAtOnce;
  return (n + kRound - 1) / kRound * kRound;
}

// In dynamic shared memory, weights[kRows][padded_parts()] follow.
template <int kRows>
struct JoinedRows {
  float4 quad[kRows][kJoinQuads];
  float4 of_group[kJoinGroups - 1][kRows][kJoinQuads];
  static int64_t bytes(int n_parts) {
    return int64_t{sizeof(JoinedRows)} + int64_t{kRows} * padded_parts(n_parts) * 4;
  }
};

// The weights of a row's parts, which add up to 1, and zeros behind them. One warp computes them.
__device__ inline void find_weights(const AttentionParts& p, int64_t row, float* weights) {
  const int lane = threadIdx.x % 32;
  float max = -INFINITY, sum = 0;
#pragma unroll 4
  for (int i = lane; i < p.n; i += 32) {
    weights[i] = p.lse[i * p.n_rows + row];
    max = fmaxf(max, weights[i]);
  }
  max = warp_max(max);
  for (int i = lane; i < p.n; i += 32) sum += weights[i] = exp2_approx(weights[i] - max);
  const float inverse = 1 / warp_sum(sum);
  for (int i = lane; i < padded_parts(p.n); i += 32)
    weights[i] = i < p.n ? weights[i] * inverse : 0;
}

__device__ inline void add_weighted(float weight, const float4& v, float4& sum) {
  sum = {sum.x + weight * v.x, sum.y + weight * v.y, sum.z + weight * v.z, sum.w + weight * v.w};
}

// s.quad[i] = row first + i * step, for i < n, for all kJoinThreads threads. Each group adds every
// second part, in order. A part without weight is not read, because it may never have been written.
template <int kRows>
__device__ void join_rows(const AttentionParts& p, int64_t first, int64_t step, int n,
                          JoinedRows<kRows>& s) {
  static_assert(kRows <= kJoinThreads / 32);
  auto* const weights = reinterpret_cast<float*>(&s + 1);
  if (const int row = threadIdx.x / 32; row < n)
    find_weights(p, first + row * step, weights + row * padded_parts(p.n));
  __syncthreads();
  const int group = threadIdx.x / kJoinQuads, quad = threadIdx.x % kJoinQuads;
  const bool exists = quad * 4 < p.cols;
#pragma unroll 1
  for (int row = 0; row < n; ++row) {
    const float* part = p.sums + (first + row * step) * kMaxJoinedCols + quad * 4;
    const float* weight = weights + row * padded_parts(p.n);
    float4 sum = {0, 0, 0, 0};
    for (int i = group; i < (exists ? p.n : 0); i += kJoinGroups * kPartsAtOnce) {
      float4 v[kPartsAtOnce];
#pragma unroll
      for (int k = 0; k < kPartsAtOnce; ++k) {
        const int at = i + k * kJoinGroups;
        v[k] = weight[at] == 0
                   ? float4{0, 0, 0, 0}
                   : *reinterpret_cast<const float4*>(part + at * p.n_rows * kMaxJoinedCols);
      }
#pragma unroll
      for (int k = 0; k < kPartsAtOnce; ++k) add_weighted(weight[i + k * kJoinGroups], v[k], sum);
    }
    (group == 0 ? s.quad[row] : s.of_group[group - 1][row])[quad] = sum;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < n * kJoinQuads; i += kJoinThreads)
    for (int g = 0; g < kJoinGroups - 1; ++g)
      add_weighted(1, s.of_group[g][i / kJoinQuads][i % kJoinQuads],
                   s.quad[i / kJoinQuads][i % kJoinQuads]);
  __syncthreads();
}

}  // namespace tandem::gpu
