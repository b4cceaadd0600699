// Each block computes 64 rows, (token, head) pairs of one sequence, over a part of its context, 16
// tokens at a time. Queries stay in registers. The keys of a tile are read from shared memory
// twice, by 32 rows each: four warps split the columns of the scores, whose partial sums are added
// in the softmax, and then the columns of the output. While values are weighted, the next tile's
// scores are computed.
#include "core/invariant.h"
#include "device.h"
#include "gpu_kernels/attention/attention.h"
#include "gpu_kernels/attention/attention_parts.h"
#include "gpu_kernels/attention/mla_tiles.h"
#include "gpu_kernels/attention/softmax.h"

namespace tandem::gpu {
namespace {

using namespace mla;

// Per warp: eight warps are two groups of 32 rows by four groups of columns.
using Queries = uint32_t[2][kScoreColumns / 16][4];
// Element i of [m][n]: row 16 m + lane / 4 + i / 2 * 8, column 8 n + lane % 4 * 2 + i % 2.
using Sums = float[2][kValueColumns / 8][4];

// The work of this block: rows [first_row, first_row + n_rows) of the sequence, n_tiles tiles of
// its context.
struct Work {
  int64_t row_of_all;  // row of q and out for first_row
  int first_row, n_rows, n_tiles;
  Context context;
  int before;  // keys that the first token of the sequence sees in addition to itself
};

__device__ Work work_of_block(const MlaDecodeArgs& a);
__device__ void leave_out(const MlaDecodeArgs& a, const Work& w);
__device__ void load_queries(const MlaDecodeArgs& a, const Work& w, Queries& q);
template <class Shared>
__device__ void score(const Queries& q, int stage, Shared& s);
template <class Shared>
__device__ void softmax(const MlaDecodeArgs& a, const Work& w, int tile, RunningSoftmax& state,
                        Shared& s);
template <class Shared>
__device__ void weigh(int stage, const Shared& s, Sums& sum);
template <class Shared>
__device__ void store(const MlaDecodeArgs& a, const Work& w, const RunningSoftmax& state, Shared& s,
                      const Sums& sum);

template <class Tiles>
__global__ void __launch_bounds__(kThreads, 1)
    mla_decode_kernel(const __grid_constant__ MlaDecodeArgs a) {
  begin_early();
  using Shared = typename Tiles::Shared;
  auto& s = shared_memory<Shared>();
  const Work w = work_of_block(a);
  if (w.n_tiles <= 0) return leave_out(a, w);
  Tiles tiles(w.context, s);
  Queries q;
  Sums sum = {};
  RunningSoftmax state;

  load_queries(a, w, q);
  tiles.begin(s);
  score(q, 0, s);
  tiles.prepare(0, s);
  // One of the two warps that share a multiprocessor's part, and so its tensor cores, decodes while
  // the other multiplies.
  const bool prepares_first = threadIdx.x < kThreads / 2;
  for (int tile = 0; tile < w.n_tiles; ++tile) {
    __syncthreads();
    softmax(a, w, tile, state, s);
    tiles.fetch(tile + 1, s);
    __syncthreads();
    if (prepares_first) tiles.prepare(tile + 1, s);
    weigh(tile % Tiles::kStages, s, sum);
    if (tile + 1 < w.n_tiles) score(q, (tile + 1) % Tiles::kStages, s);
    if (!prepares_first) tiles.prepare(tile + 1, s);
  }
  store(a, w, state, s, sum);
}

// Each split of the context has at least kMinTiles tiles, so that short contexts have fewer parts.
__device__ Work work_of_block(const MlaDecodeArgs& a) {
  const int seq = blockIdx.z, heads = a.n_heads, length = a.sequences.kv_length[seq];
  const int n_tokens = a.sequences.n_tokens[seq];
  Work w;
  w.first_row = blockIdx.x * kRows;
  w.n_rows = min(kRows, n_tokens * heads - w.first_row);
  w.row_of_all = int64_t{a.sequences.first_token[seq]} * heads + w.first_row;
  w.before = length - n_tokens;
  const int n_tiles = (length + kTile - 1) / kTile;
  const int each = max(kMinTiles, (n_tiles + a.n_splits - 1) / a.n_splits);
  const int first = blockIdx.y * each;
  w.n_tiles = w.n_rows > 0 ? min(each, n_tiles - first) : 0;
  w.context = {&a.cache, a.sequences.pages + int64_t{seq} * a.sequences.max_pages, first * kTile,
               min(length, (first + each) * kTile)};
  return w;
}

// Marks the rows of a split without tokens as unused.
__device__ void leave_out(const MlaDecodeArgs& a, const Work& w) {
  const int row = threadIdx.x;
  if (row < w.n_rows) a.partial_lse[blockIdx.y * a.n_rows + w.row_of_all + row] = -INFINITY;
}

// Loads A fragments of [q | q_rope], each column where the cache has it; zero elsewhere and for
// missing rows.
__device__ void load_queries(const MlaDecodeArgs& a, const Work& w, Queries& q) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rank = a.cache.kv_rank, key = a.cache.fp8 ? kMaxKvRank : rank;
  // After keys of odd width, the queries for rope keys begin at odd floats.
  const bool even = (reinterpret_cast<uintptr_t>(a.q_rope) | a.q_rope_stride * 4) % 8 == 0;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int k = 0; k < kScoreColumns / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = warp / 4 * 32 + m * 16 + lane / 4 + i % 2 * 8;
        const int column = warp % 4 * kScoreColumns + k * 16 + lane % 4 * 2 + i / 2 * 8;
        float2 v = {0, 0};
        const bool in_latent = column < rank;
        const bool in_key = column >= key && column < key + a.cache.rope_dim;
        if (row < w.n_rows && (in_latent || in_key)) {
          const int64_t r = w.row_of_all + row;
          const float* from = in_latent ? a.q + r * a.q_stride + column
                                        : a.q_rope + r * a.q_rope_stride + column - key;
          v = in_latent || even ? *reinterpret_cast<const float2*>(from) : float2{from[0], from[1]};
        }
        q[m][k][i] = pack_bf16(v.x, v.y);
      }
}

// This warp's partial sum, over its columns, of scores[32 rows, 16 tokens].
template <class Shared>
__device__ void score(const Queries& q, int stage, Shared& s) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float part[2][2][4] = {};
#pragma unroll
  for (int k = 0; k < kScoreColumns / 16; ++k) {
    uint32_t keys[4];
    ldmatrix_x4(keys, &s.kv[stage][lane / 16 * 8 + lane % 8]
                           [warp % 4 * kScoreColumns + k * 16 + lane / 8 % 2 * 8]);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      mma_m16n8k16(part[m][0], q[m][k], keys[0], keys[1]);
      mma_m16n8k16(part[m][1], q[m][k], keys[2], keys[3]);
    }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<float2*>(
            &s.part[warp % 4][warp / 4 * 32 + m * 16 + lane / 4 + i * 8][n * 8 + lane % 4 * 2]) =
            make_float2(part[m][n][2 * i], part[m][n][2 * i + 1]);
}

// Four adjacent lanes share a row, four tokens each.
template <class Shared>
__device__ void softmax(const MlaDecodeArgs& a, const Work& w, int tile, RunningSoftmax& state,
                        Shared& s) {
  const int row = threadIdx.x / 4, first = threadIdx.x % 4 * 4;
  const int visible = w.before + 1 + (w.first_row + row) / a.n_heads;
  const int n_visible = min(visible, w.context.end) - (w.context.begin + tile * kTile);
  float v[4] = {};
#pragma unroll
  for (int group = 0; group < 4; ++group) {
    const float4 part = *reinterpret_cast<const float4*>(&s.part[group][row][first]);
    v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
  }
  float max = state.max;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = first + i < n_visible ? v[i] * (a.softmax_scale * kLog2E) : -INFINITY;
    max = fmaxf(max, v[i]);
  }
  for (int d = 2; d > 0; d /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, d));
  const float base = finite_max(max), rescale = exp2_approx(state.max - base);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum += v[i] = exp2_approx(v[i] - base);
  for (int d = 2; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  *reinterpret_cast<uint2*>(&s.weights[row][first]) = {pack_bf16(v[0], v[1]),
                                                       pack_bf16(v[2], v[3])};
  if (threadIdx.x % 4 == 0) s.rescale[row] = rescale;
  state = {max, state.sum * rescale + sum};
}

// sum[32 rows, 128 columns of this warp] = sum * rescale + weights[32, 16] values[16, 128].
template <class Shared>
__device__ void weigh(int stage, const Shared& s, Sums& sum) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float* rescale = &s.rescale[warp / 4 * 32];
  if (__ballot_sync(~0u, rescale[lane] != 1)) {  // a maximum has grown
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const float factor[2] = {rescale[m * 16 + lane / 4], rescale[m * 16 + lane / 4 + 8]};
#pragma unroll
      for (int n = 0; n < kValueColumns / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][n][i] *= factor[i / 2];
    }
  }
  uint32_t weights[2][4];
#pragma unroll
  for (int m = 0; m < 2; ++m)
    ldmatrix_x4(weights[m], &s.weights[warp / 4 * 32 + m * 16 + lane % 16][lane / 16 * 8]);
#pragma unroll
  for (int n = 0; n < kValueColumns / 8; n += 2) {
    uint32_t values[4];
    ldmatrix_x4_trans(values,
                      &s.kv[stage][lane % 16][warp % 4 * kValueColumns + n * 8 + lane / 16 * 8]);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      mma_m16n8k16(sum[m][n], weights[m], values[0], values[1]);
      mma_m16n8k16(sum[m][n + 1], weights[m], values[2], values[3]);
    }
  }
}

// A row that sees none of these tokens has lse = -inf, and its part is not used.
template <class Shared>
__device__ void store(const MlaDecodeArgs& a, const Work& w, const RunningSoftmax& state, Shared& s,
                      const Sums& sum) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool whole = a.n_splits == 1;
  __syncthreads();  // all reads of rescale are done
  if (threadIdx.x % 4 == 0) {
    const int row = threadIdx.x / 4;
    s.rescale[row] = state.sum > 0 ? 1 / state.sum : 0;
    if (!whole && row < w.n_rows)
      a.partial_lse[blockIdx.y * a.n_rows + w.row_of_all + row] = state.max + log2f(state.sum);
  }
  __syncthreads();
  float* out = whole ? a.out : a.partial + blockIdx.y * a.n_rows * kMaxJoinedCols;
  const int64_t stride = whole ? a.out_stride : kMaxJoinedCols;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int row = warp / 4 * 32 + m * 16 + lane / 4 + i / 2 * 8;
      if (row >= w.n_rows) continue;
      const float inverse = s.rescale[row];
#pragma unroll
      for (int n = 0; n < kValueColumns / 8; ++n) {
        const int column = warp % 4 * kValueColumns + n * 8 + lane % 4 * 2;
        if (column < a.cache.kv_rank)
          *reinterpret_cast<float2*>(out + (w.row_of_all + row) * stride + column) =
              make_float2(sum[m][n][i] * inverse, sum[m][n][i + 1] * inverse);
      }
    }
}

AttentionParts parts_of(const MlaDecodeArgs& a) {
  return {a.partial, a.partial_lse, a.n_splits, a.n_rows, a.cache.kv_rank};
}

struct JoinArgs {
  AttentionParts parts;
  PagedSequences sequences;
  float* out;
  int64_t out_stride;
  int n_heads, cols;
};

// One block combines the parts of one row. Without room for two blocks in its bounds ptxas keeps
// two loads in flight, not 16.
__global__ void __launch_bounds__(kJoinThreads, 2)
    mla_combine_kernel(const __grid_constant__ JoinArgs a) {
  begin_early();
  const int seq = blockIdx.y, row_of_sequence = blockIdx.x;
  if (row_of_sequence >= a.sequences.n_tokens[seq] * a.n_heads) return;
  auto& s = shared_memory<JoinedRows<1>>();
  const int64_t row = int64_t{a.sequences.first_token[seq]} * a.n_heads + row_of_sequence;
  join_rows(a.parts, row, 0, 1, s);
  const int column = threadIdx.x * 2;
  if (column < a.cols)
    *reinterpret_cast<float2*>(a.out + row * a.out_stride + column) =
        *reinterpret_cast<const float2*>(reinterpret_cast<const float*>(s.quad[0]) + column);
}

template <class Tiles>
void launch_decode(const Stream& stream, const MlaDecodeArgs& a) {
  const int max_rows = a.sequences.max_tokens * a.n_heads;
  launch(mla_decode_kernel<Tiles>,
         {.grid_x = (max_rows + kRows - 1) / kRows,
          .grid_y = a.n_splits,
          .grid_z = a.sequences.n,
          .threads = kThreads,
          .shared_bytes = sizeof(typename Tiles::Shared),
          .early = true},
         stream, a);
  if (a.n_splits > 1 && a.combines)
    launch(mla_combine_kernel,
           {.grid_x = max_rows,
            .grid_y = a.sequences.n,
            .threads = kJoinThreads,
            .shared_bytes = JoinedRows<1>::bytes(a.n_splits),
            .early = true},
           stream, {parts_of(a), a.sequences, a.out, a.out_stride, a.n_heads, a.cache.kv_rank});
}

}  // namespace

AttentionParts attention_parts(const MlaDecodeArgs& a, int64_t first_row) {
  if (a.n_splits == 1) return {};
  AttentionParts parts = parts_of(a);
  parts.sums += first_row * kMaxJoinedCols;
  parts.lse += first_row;
  return parts;
}

void mla_decode(const Stream& stream, const MlaDecodeArgs& a) {
  const LatentCache& c = a.cache;
  check(c.kv_rank <= kMaxKvRank && c.kv_rank + c.rope_dim <= kMaxCacheDim, "dimensions of MLA");
  check(c.kv_rank % 2 == 0 && c.rope_dim % 2 == 0, "odd dimensions of MLA");
  check(!c.fp8 || c.rope_dim <= kMaxCacheDim - kMaxKvRank, "dimensions of an FP8 cache");
  check(c.fp8 || c.stride % 8 == 0, "rows of the cache begin at multiples of 16 bytes");
  const auto run = c.fp8 ? &launch_decode<Fp8Tiles> : &launch_decode<Bf16Tiles>;
  const PagedSequences& all = a.sequences;
  for (int first = 0; first < all.n; first += kMaxGridYz) {
    MlaDecodeArgs part = a;
    part.sequences.first_token += first;
    part.sequences.n_tokens += first;
    part.sequences.kv_length += first;
    part.sequences.pages += int64_t{first} * all.max_pages;
    part.sequences.n = min(all.n - first, kMaxGridYz);
    run(stream, part);
  }
}

// A few blocks divide the context so that each multiprocessor has one, because contexts may be
// long. For more, the time of all waves of blocks is least for a context of 8,192 tokens. In tiles
// of the cache, whose bytes are 18 KB, a block's queries and results take 12, and a split's part of
// 128 KB is read again.
int mla_decode_splits(int n_sequences, int max_tokens, int n_heads, int n_multiprocessors,
                      int max_splits) {
  constexpr double kTiles = 512, kBlockTiles = 12, kPartTiles = 7.3, kCombineTiles = 5;
  constexpr int kManySplits = 16;
  const int row_blocks = (max_tokens * n_heads + kRows - 1) / kRows;
  const int64_t blocks = int64_t{n_sequences} * row_blocks;
  if (kManySplits * blocks <= n_multiprocessors)
    return min(static_cast<int>(n_multiprocessors / blocks), max_splits);
  int best = 1;
  double least = INFINITY;
  for (int splits = 1; splits <= min(kManySplits, max_splits); ++splits) {
    const int64_t waves = (blocks * splits + n_multiprocessors - 1) / n_multiprocessors;
    double time = static_cast<double>(waves) * (kTiles / splits + kBlockTiles);
    if (splits > 1)
      time += kPartTiles * static_cast<double>(blocks * splits) / n_multiprocessors + kCombineTiles;
    if (time < least) least = time, best = splits;
  }
  return best;
}

}  // namespace tandem::gpu
