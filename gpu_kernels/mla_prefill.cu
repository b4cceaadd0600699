// Attention of many tokens of one sequence in the naive form. Latents are gathered from their
// pages, and kv_b restores keys and values of some heads for the whole context. A block attends
// with 128 tokens of one head, 64 keys at a time. A warp keeps the scores of its 16 tokens in
// registers, where they become the weights of the values.
#include "core/invariant.h"
#include "device.h"
#include "gpu_kernels/attention.h"
#include "gpu_kernels/latents.h"
#include "gpu_kernels/softmax.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 128, kWarpTokens = 16;  // per block and per warp
constexpr int kKeys = 64, kStages = 2;
// Odd numbers of 16-byte units avoid bank conflicts.
constexpr int kKeyRow = kMaxQkDim + 8, kValueRow = kMaxVDim + 8;

struct Shared {
  alignas(16) bf16 keys[kStages][kKeys][kKeyRow];
  alignas(16) bf16 values[kStages][kKeys][kValueRow];
};

struct KernelArgs {
  MlaPrefillArgs a;
  int first_head, n_heads;  // the restored heads
};

using Queries = uint32_t[kMaxQkDim / 16][4];
// Element i of [n]: token lane / 4 + i / 2 * 8 of the warp, key or column 8 n + lane % 4 * 2 + i
// % 2.
using Scores = float[kKeys / 8][4];
using Sums = float[kMaxVDim / 8][4];

// Keys are [nope | zeros up to a multiple of 8 | rope].
struct Head {
  int index, of_group;  // among all heads; among the restored heads
  int rope_column;
};

__device__ void load_queries(const MlaPrefillArgs& a, const Head& head, int first_token,
                             Queries& q);
__device__ void load_tile(const KernelArgs& k, const Head& head, int tile, Shared& s);
__device__ void score(const Queries& q, int stage, const Shared& s, Scores& scores);
__device__ void softmax(int n_visible, float scale, RunningSoftmax (&state)[2], Scores& scores,
                        Sums& sum);
__device__ void weigh(const Scores& weights, int stage, const Shared& s, Sums& sum);
__device__ void store(const MlaPrefillArgs& a, const Head& head, int first_token,
                      RunningSoftmax (&state)[2], const Sums& sum);

__global__ void __launch_bounds__(kThreads, 1)
    mla_prefill_kernel(const __grid_constant__ KernelArgs k) {
  auto& s = shared_memory<Shared>();
  const MlaPrefillArgs& a = k.a;
  const Head head = {k.first_head + static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.x),
                     (a.nope_dim + 7) / 8 * 8};
  // The last tokens see the most keys and start first.
  const int block_token = (gridDim.y - 1 - blockIdx.y) * kTokens;
  const int first_token = block_token + threadIdx.x / 32 * kWarpTokens;
  const int before = a.kv_length - a.n_tokens;  // keys before the sequence's first query token
  const int n_keys = before + min(a.n_tokens, block_token + kTokens);
  const int n_tiles = (n_keys + kKeys - 1) / kKeys;
  Queries q;
  Sums sum = {};
  RunningSoftmax state[2];

  load_tile(k, head, 0, s);
  cp_async_commit();
  load_queries(a, head, first_token, q);
  for (int tile = 0; tile < n_tiles; ++tile) {
    if (tile + 1 < n_tiles) load_tile(k, head, tile + 1, s);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    const int n_visible = before + 1 + first_token - tile * kKeys;  // for the warp's first token
    if (n_visible + kWarpTokens > 1) {
      Scores scores = {};
      score(q, tile % kStages, s, scores);
      softmax(n_visible, a.softmax_scale * kLog2E, state, scores, sum);
      weigh(scores, tile % kStages, s, sum);
    }
    __syncthreads();
  }
  store(a, head, first_token, state, sum);
}

__device__ void load_queries(const MlaPrefillArgs& a, const Head& head, int first_token,
                             Queries& q) {
  const int lane = threadIdx.x % 32;
  const auto at = [&](const float* row, const float* rope_row, int column) -> float {
    if (column < a.nope_dim) return row[column];
    const int rope = column - head.rope_column;
    return rope >= 0 && rope < a.cache.rope_dim ? rope_row[rope] : 0;
  };
#pragma unroll
  for (int k = 0; k < kMaxQkDim / 16; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = first_token + lane / 4 + i % 2 * 8;
      const int column = k * 16 + lane % 4 * 2 + i / 2 * 8;
      q[k][i] = 0;
      if (token >= a.n_tokens) continue;
      const int64_t row = int64_t{token} * a.n_heads + head.index;
      const float *nope = a.q + row * a.q_stride, *rope = a.q_rope + row * a.q_rope_stride;
      q[k][i] = pack_bf16(at(nope, rope, column), at(nope, rope, column + 1));
    }
}

// Rows beyond the context and columns beyond the dimensions become zeros.
__device__ void load_tile(const KernelArgs& k, const Head& head, int tile, Shared& s) {
  const MlaPrefillArgs& a = k.a;
  constexpr int kKeyChunks = kMaxQkDim / 8, kChunks = kKeyChunks + kMaxVDim / 8;
  const int stage = tile % kStages, head_dim = a.nope_dim + a.v_dim;
  for (int i = threadIdx.x; i < kKeys * kChunks; i += kThreads) {
    const int row = i / kChunks, chunk = i % kChunks, token = tile * kKeys + row;
    const bool valid = token < a.kv_length;
    const bf16* own =
        a.restored + int64_t{token} * k.n_heads * head_dim + int64_t{head.of_group} * head_dim;
    const int column = (chunk < kKeyChunks ? chunk : chunk - kKeyChunks) * 8;
    if (chunk >= kKeyChunks) {
      copy_8(&s.values[stage][row][column], own + a.nope_dim + column,
             valid ? a.v_dim - column : 0);
    } else if (column < head.rope_column) {
      copy_8(&s.keys[stage][row][column], own + column, valid ? a.nope_dim - column : 0);
    } else {
      const int rope = column - head.rope_column, n = a.cache.rope_dim - rope;
      const bool copied = valid && n > 0;
      copy_8(&s.keys[stage][row][column],
             copied ? rope_key(a.cache, a.pages, token) + rope : a.restored, copied ? n : 0);
    }
  }
}

__device__ void score(const Queries& q, int stage, const Shared& s, Scores& scores) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kMaxQkDim / 16; ++k)
#pragma unroll
    for (int n = 0; n < kKeys / 8; n += 2) {
      uint32_t keys[4];
      ldmatrix_x4(keys,
                  &s.keys[stage][n * 8 + lane / 16 * 8 + lane % 8][k * 16 + lane / 8 % 2 * 8]);
      mma_m16n8k16(scores[n], q[k], keys[0], keys[1]);
      mma_m16n8k16(scores[n + 1], q[k], keys[2], keys[3]);
    }
}

// Turns scores into weights and rescales previous sums to the new maximum. The warp's token r sees
// n_visible + r of these keys. Four lanes share the rows lane / 4 and lane / 4 + 8.
__device__ void softmax(int n_visible, float scale, RunningSoftmax (&state)[2], Scores& scores,
                        Sums& sum) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int visible = n_visible + lane / 4 + half * 8 - lane % 4 * 2;
    float max = state[half].max;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& v = scores[n][half * 2 + e];
        v = n * 8 + e < visible ? v * scale : -INFINITY;
        max = fmaxf(max, v);
      }
    for (int d = 2; d > 0; d /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, d));
    const float base = finite_max(max), rescale = exp2_approx(state[half].max - base);
    float added = 0;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& v = scores[n][half * 2 + e];
        v = exp2_approx(v - base);
        added += v;
      }
    state[half] = {max, state[half].sum * rescale + added};  // sum over this lane's keys
#pragma unroll
    for (int n = 0; n < kMaxVDim / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) sum[n][half * 2 + e] *= rescale;
  }
}

// The accumulators of two score products form the A fragment of a value product.
__device__ void weigh(const Scores& weights, int stage, const Shared& s, Sums& sum) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    const float *left = weights[2 * k], *right = weights[2 * k + 1];
    const uint32_t w[4] = {pack_bf16(left[0], left[1]), pack_bf16(left[2], left[3]),
                           pack_bf16(right[0], right[1]), pack_bf16(right[2], right[3])};
#pragma unroll
    for (int n = 0; n < kMaxVDim / 8; n += 2) {
      uint32_t values[4];
      ldmatrix_x4_trans(values, &s.values[stage][k * 16 + lane % 16][n * 8 + lane / 16 * 8]);
      mma_m16n8k16(sum[n], w, values[0], values[1]);
      mma_m16n8k16(sum[n + 1], w, values[2], values[3]);
    }
  }
}

__device__ void store(const MlaPrefillArgs& a, const Head& head, int first_token,
                      RunningSoftmax (&state)[2], const Sums& sum) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = state[half].sum;
    for (int d = 2; d > 0; d /= 2) total += __shfl_xor_sync(~0u, total, d);
    const int token = first_token + lane / 4 + half * 8;
    if (token >= a.n_tokens) continue;
    float* out = a.out + (int64_t{token} * a.n_heads + head.index) * a.out_stride;
    const float inverse = 1 / total;
#pragma unroll
    for (int n = 0; n < kMaxVDim / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = n * 8 + lane % 4 * 2 + e;
        if (column < a.v_dim) out[column] = sum[n][half * 2 + e] * inverse;
      }
  }
}

}  // namespace

void mla_prefill(const Stream& stream, const MlaPrefillArgs& a) {
  const int head_dim = a.nope_dim + a.v_dim;
  check((a.nope_dim + 7) / 8 * 8 + a.cache.rope_dim <= kMaxQkDim && a.v_dim <= kMaxVDim,
        "dimensions of MLA");
  check(a.kv_length >= a.n_tokens && a.kv_b.rows == a.n_heads * head_dim, "shapes of mla_prefill");
  const int64_t latent_stride = product_stride(a.cache.kv_rank);
  gather_latents(stream, {a.cache, a.pages, a.latents, latent_stride, a.kv_length});
  for (int first = 0; first < a.n_heads; first += a.heads_at_once) {
    const int n = min(a.heads_at_once, a.n_heads - first);
    Weight w = a.kv_b;
    w.data = static_cast<const uint8_t*>(w.data) +
             int64_t{first} * head_dim * w.stride * bytes_of(w.type);
    w.row0 += first * head_dim;
    w.rows = n * head_dim;
    matrix_product(stream, {.x = a.latents,
                            .w = w,
                            .out = nullptr,
                            .rounded = a.restored,
                            .x_stride = latent_stride,
                            .out_stride = int64_t{n} * head_dim,
                            .n_tokens = a.kv_length,
                            .workspace = {}});
    launch(mla_prefill_kernel,
           {.grid_x = n,
            .grid_y = (a.n_tokens + kTokens - 1) / kTokens,
            .threads = kThreads,
            .shared_bytes = sizeof(Shared)},
           stream, {a, first, n});
  }
}

}  // namespace tandem::gpu
