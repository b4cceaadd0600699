// Attention of many tokens of one sequence in the naive form. Latents are gathered from their
// pages, and kv_b restores keys and values of some heads for a piece of the context. A block
// attends with 128 tokens of one head, 64 keys at a time. A warp keeps the scores of its 16 tokens
// in registers, where they become the weights of the values. Between pieces, memory holds the
// running softmax and, in `out`, the sums.
#include "core/invariant.h"
#include "device.h"
#include "gpu_kernels/attention/attention.h"
#include "gpu_kernels/attention/latents.h"
#include "gpu_kernels/attention/softmax.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 128, kWarpTokens = 16;  // per block and per warp
constexpr int kKeys = kPrefillKeys, kStages = 2;
// Odd numbers of 16-byte units avoid bank conflicts.
constexpr int kKeyRow = kMaxQkDim + 8, kValueRow = kMaxVDim + 8;

struct Shared {
  alignas(16) bf16 keys[kStages][kKeys][kKeyRow];
  alignas(16) bf16 values[kStages][kKeys][kValueRow];
};

struct KernelArgs {
  MlaPrefillArgs a;
  int first_head, n_heads;  // the restored heads
  int first_key, end_key;   // the restored piece of the context
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
__device__ void load_sums(const MlaPrefillArgs& a, const Head& head, int first_token,
                          RunningSoftmax (&state)[2], Sums& sum);
__device__ void load_tile(const KernelArgs& k, const Head& head, int tile, Shared& s);
__device__ void score(const Queries& q, int stage, const Shared& s, Scores& scores);
__device__ void softmax(int n_visible, float scale, RunningSoftmax (&state)[2], Scores& scores,
                        Sums& sum);
__device__ void weigh(const Scores& weights, int stage, const Shared& s, Sums& sum);
__device__ void store(const MlaPrefillArgs& a, const Head& head, int first_token, bool complete,
                      RunningSoftmax (&state)[2], const Sums& sum);

__global__ void __launch_bounds__(kThreads, 1)
    mla_prefill_kernel(const __grid_constant__ KernelArgs k) {
  auto& s = shared_memory<Shared>();
  const MlaPrefillArgs& a = k.a;
  const Head head = {k.first_head + static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.y),
                     (a.nope_dim + 7) / 8 * 8};
  // Blocks of a head run at the same time and share its keys in the level-2 cache. The last tokens
  // see the most keys and start first.
  const int block_token = (gridDim.x - 1 - blockIdx.x) * kTokens;
  const int first_token = block_token + threadIdx.x / 32 * kWarpTokens;
  const int before = a.kv_length - a.n_tokens;  // keys before the sequence's first query token
  const int n_keys = before + min(a.n_tokens, block_token + kTokens);
  if (n_keys <= k.first_key) return;
  const int first_tile = k.first_key / kKeys;
  const int end_tile = (min(n_keys, k.end_key) + kKeys - 1) / kKeys;
  Queries q;
  Sums sum = {};
  RunningSoftmax state[2];

  load_tile(k, head, first_tile, s);
  cp_async_commit();
  load_queries(a, head, first_token, q);
  if (k.first_key > 0) load_sums(a, head, first_token, state, sum);
  for (int tile = first_tile; tile < end_tile; ++tile) {
    if (tile + 1 < end_tile) load_tile(k, head, tile + 1, s);
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
  store(a, head, first_token, n_keys <= k.end_key, state, sum);
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

// Continues from store(). The sum of a row's four lanes goes to one of them.
__device__ void load_sums(const MlaPrefillArgs& a, const Head& head, int first_token,
                          RunningSoftmax (&state)[2], Sums& sum) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = first_token + lane / 4 + half * 8;
    if (token >= a.n_tokens) continue;
    const int64_t row = int64_t{token} * a.n_heads + head.index;
    state[half] = {a.carried[2 * row], lane % 4 == 0 ? a.carried[2 * row + 1] : 0};
    const float* out = a.out + row * a.out_stride;
#pragma unroll
    for (int n = 0; n < kMaxVDim / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = n * 8 + lane % 4 * 2 + e;
        if (column < a.v_dim) sum[n][half * 2 + e] = out[column];
      }
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
        a.restored + (int64_t{token - k.first_key} * k.n_heads + head.of_group) * head_dim;
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

// `complete`: all keys of these tokens were seen.
__device__ void store(const MlaPrefillArgs& a, const Head& head, int first_token, bool complete,
                      RunningSoftmax (&state)[2], const Sums& sum) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = state[half].sum;
    for (int d = 2; d > 0; d /= 2) total += __shfl_xor_sync(~0u, total, d);
    const int token = first_token + lane / 4 + half * 8;
    if (token >= a.n_tokens) continue;
    const int64_t row = int64_t{token} * a.n_heads + head.index;
    float* out = a.out + row * a.out_stride;
    const float factor = complete ? 1 / total : 1;
#pragma unroll
    for (int n = 0; n < kMaxVDim / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = n * 8 + lane % 4 * 2 + e;
        if (column < a.v_dim) out[column] = sum[n][half * 2 + e] * factor;
      }
    if (complete || lane % 4 != 0) continue;
    a.carried[2 * row] = state[half].max;
    a.carried[2 * row + 1] = total;
  }
}

// Restores keys and values of some heads for a piece of the context, and attends with them.
void restore_and_attend(const Stream& stream, const KernelArgs& k) {
  const MlaPrefillArgs& a = k.a;
  const int head_dim = a.nope_dim + a.v_dim;
  const int64_t latent_stride = product_stride(a.cache.kv_rank);
  Weight w = a.kv_b;
  w.data = static_cast<const uint8_t*>(w.data) +
           int64_t{k.first_head} * head_dim * w.stride * bytes_of(w.type);
  w.row0 += k.first_head * head_dim;
  w.rows = k.n_heads * head_dim;
  matrix_product(stream, {.x = a.latents + k.first_key * latent_stride,
                          .w = w,
                          .out = nullptr,
                          .rounded = a.restored,
                          .x_stride = latent_stride,
                          .out_stride = int64_t{k.n_heads} * head_dim,
                          .n_tokens = k.end_key - k.first_key,
                          .workspace = {}});
  launch(mla_prefill_kernel,
         {.grid_x = (a.n_tokens + kTokens - 1) / kTokens,
          .grid_y = k.n_heads,
          .threads = kThreads,
          .shared_bytes = sizeof(Shared)},
         stream, k);
}

}  // namespace

void mla_prefill(const Stream& stream, const MlaPrefillArgs& a) {
  check((a.nope_dim + 7) / 8 * 8 + a.cache.rope_dim <= kMaxQkDim && a.v_dim <= kMaxVDim,
        "dimensions of MLA");
  check(a.kv_length >= a.n_tokens && a.kv_b.rows == a.n_heads * (a.nope_dim + a.v_dim),
        "shapes of mla_prefill");
  check(a.plan.keys >= a.kv_length || a.plan.keys % kKeys == 0, "pieces of whole tiles");
  gather_latents(stream,
                 {a.cache, a.pages, a.latents, product_stride(a.cache.kv_rank), a.kv_length});
  for (int head = 0; head < a.n_heads; head += a.plan.heads)
    for (int key = 0; key < a.kv_length; key += a.plan.keys)
      restore_and_attend(stream, {.a = a,
                                  .first_head = head,
                                  .n_heads = min(a.plan.heads, a.n_heads - head),
                                  .first_key = key,
                                  .end_key = min(a.kv_length, key + a.plan.keys)});
}

// Time is counted in tiles of a block, for the waves of all launches. The more heads, the shorter
// the pieces. A piece costs a block the reading of its queries and the reading and writing of its
// sums: 229 KB, as much as a multiprocessor receives during about 8 tiles.
PrefillPlan mla_prefill_plan(const PrefillSize& s) {
  constexpr int kPieceTiles = 8;
  const auto up = [](int64_t n, int64_t by) { return (n + by - 1) / by; };
  const int64_t blocks = up(s.n_tokens, kTokens);  // of a head
  const auto waves = [&](int64_t heads) { return up(heads * blocks, s.n_multiprocessors); };
  PrefillPlan best = {};
  int64_t best_time = INT64_MAX;
  for (int heads = s.n_heads; heads > 0; --heads) {
    const int64_t room = s.capacity / heads / kKeys * kKeys;
    if (room == 0) continue;
    const int64_t pieces = up(s.kv_length, room);
    const int64_t all_waves = s.n_heads / heads * waves(heads) + waves(s.n_heads % heads);
    const int64_t time = all_waves * (up(s.kv_length, kKeys) + pieces * kPieceTiles);
    if (time >= best_time) continue;
    best_time = time;
    best = {heads, static_cast<int>(up(up(s.kv_length, pieces), kKeys) * kKeys)};
  }
  return best;
}

}  // namespace tandem::gpu
