// Products of few tokens. w is read once, 16 bytes per lane directly into registers, and is the A
// operand of the tensor cores; tokens are the 8 columns of B. The sum allows any order of columns,
// so a lane multiplies whichever 16 bytes it loads, and x is stored in shared memory to match.
// Where w has too few rows to fill the GPU, blocks split its columns. A second matrix has blocks of
// its own, or lends every block its up rows: a lane then has gate and up of the same output.
#include "core/invariant.h"
#include "device.h"
#include "gpu_kernels/attention/attention_parts.h"
#include "gpu_kernels/e4m3.h"
#include "gpu_kernels/products/pointwise.h"
#include "gpu_kernels/products/skinny_per_head.h"
#include "gpu_kernels/reduce.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = kJoinThreads, kWarps = kThreads / 32;
constexpr int kRows = kWarps * 16;  // rows of w per block
constexpr int kStep = 64;           // columns that a warp multiplies at a time
constexpr int kMaxSteps = 16;       // per block
constexpr int kResident = 2;        // blocks per multiprocessor
constexpr int kSplitsAtOnce = 8;    // that a thread of the last block loads at a time
constexpr int kXAtOnce = 4;         // times 8 columns of x that a thread loads at a time

// Steps whose weights are loaded while the same number is multiplied: 128 bytes per lane.
template <Number kType>
constexpr int kGroup = kType == Number::kF8E4M3 ? 4 : 2;

// x of step s, half p, tile i of 8 tokens, lane l: 8 columns of token 8 i + l / 4.
template <int kTiles>
struct alignas(16) Shared {
  uint4 x[kMaxSteps][2][kTiles][32];
  float scale[kMaxSteps][kRows];
  float norm[kSkinnyTokens];  // factor of each token, for gain
  bool last;
};

using Joined = JoinedRows<kJoinTokens>;

// Data that a lane loads per step: rows lane / 4 and lane / 4 + 8 of the warp's 16. FP8 needs one
// uint4 per row, BF16 two.
template <Number kType>
struct Loaded {
  static constexpr int kLoads = kType == Number::kF8E4M3 ? 1 : 2;
  uint4 word[2][kLoads];
};

// Columns [first, first + n_steps * kStep) of w.
struct Share {
  int first, n_steps;
};

struct Plan {
  int row_blocks, splits, steps_each;
  double share;  // skinny_share()
};

// blockIdx.z selects a head and up to 16 of its tokens.
struct KernelArgs {
  SkinnyArgs a;  // for head 0
  int steps_each;
  int n_heads, rows_per_head;
  AttentionParts parts = {};  // of row token * n_heads + head
};

// The product of a block. Its rows of w are [first, first + kRows), or with Second::kGated
// [first, first + kRows / 2) of both matrices: 8 rows of gate, then 8 of up for each warp.
struct Block {
  SkinnyArgs a;  // for the head, tokens and matrix of the block
  int first;
  float* partial;  // [splits, n_tokens, rows_of_part], for this matrix
  bool gated;

  __device__ const Weight& w(bool second_half) const { return gated && second_half ? a.w_2 : a.w; }
  // Row of w() for the block's row i of kRows.
  __device__ int row(int i) const { return first + (gated ? i / 16 * 8 + i % 8 : i); }
  __device__ int rows_of_part() const { return gated ? 2 * a.w.rows : a.w.rows; }
};

// The first of the 8 columns that a lane multiplies in half p of a step.
template <Number kType>
__device__ int column_of(int half, int lane) {
  return kType == Number::kF8E4M3 ? lane % 4 * 16 + half * 8 : half * 32 + lane % 4 * 8;
}

// Where 8 columns of x go: item i of those that a block stages, for its share of the columns.
struct XPlace {
  int step, half, tile, lane;
  int token, column;
};
template <Number kType, int kTiles>
__device__ XPlace x_place(int i, const Share& share) {
  const int lane = i % 32, tile = i / 32 % kTiles, half = i / (32 * kTiles) % 2;
  const int step = i / (64 * kTiles);
  return {step,
          half,
          tile,
          lane,
          tile * 8 + lane / 4,
          share.first + step * kStep + column_of<kType>(half, lane)};
}

__device__ Block this_block(const KernelArgs& k);
__device__ Share share_of_block(const SkinnyArgs& a, int steps_each);
template <Number kType>
__device__ void load_group(const Weight& w, const Share& share, int step,
                           const uint8_t* const (&row)[2], Loaded<kType> (&out)[kGroup<kType>]);
template <Number kType, int kTiles>
__device__ void stage_x(const SkinnyArgs& a, const Share& share, Shared<kTiles>& s);
template <int kTiles>
__device__ void find_norms(const SkinnyArgs& a, Shared<kTiles>& s);
template <int kTiles>
__device__ void stage_scales(const Block& b, const Share& share, Shared<kTiles>& s);
template <Number kType, int kTiles>
__device__ void multiply(int step, const Loaded<kType>& loaded, const Shared<kTiles>& s,
                         float (&sum)[kTiles][4]);
template <int kTiles>
__device__ void store(const Block& b, const float (&sum)[kTiles][4], Shared<kTiles>& s);
__device__ void add_parts(const Block& b);

// With kJoins, x is joined from parts behind Shared.
template <Number kType, int kTiles, bool kJoins>
__global__ void __launch_bounds__(kThreads, 2) skinny_kernel(const __grid_constant__ KernelArgs k) {
  Block b = this_block(k);
  const SkinnyArgs& a = b.a;
  auto& s = shared_memory<Shared<kTiles>>();
  const Share share = share_of_block(a, k.steps_each);
  const int lane = threadIdx.x % 32, row_of_block = threadIdx.x / 32 * 16 + lane / 4;
  const uint8_t* rows[2];
  for (int i = 0; i < 2; ++i) {  // missing rows are copies and not stored
    const Weight& w = b.w(i);
    const int64_t row = min(b.row(row_of_block + 8 * i), w.rows - 1);
    rows[i] = static_cast<const uint8_t*>(w.data) +
              (row * w.stride + share.first + column_of<kType>(0, lane)) * bytes_of(kType);
  }

  constexpr int kSteps = kGroup<kType>;
  Loaded<kType> now[kSteps], next[kSteps];
  float sum[kTiles][4] = {};
  const auto multiply_group = [&](int step, const Loaded<kType>(&loaded)[kSteps]) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      if (step + i < share.n_steps) multiply<kType>(step + i, loaded[i], s, sum);
  };
  load_group<kType>(a.w, share, 0, rows, now);
  begin_early();  // weights were written long before
  if constexpr (kJoins) {
    auto& joined = *reinterpret_cast<Joined*>(&s + 1);
    join_rows(k.parts, blockIdx.z, k.n_heads, a.n_tokens, joined);
    b.a.x = reinterpret_cast<const float*>(joined.quad);
    b.a.x_stride = kMaxJoinedCols;
  }
  if (a.gain) find_norms(a, s);
  stage_x<kType>(a, share, s);
  if constexpr (kType == Number::kF8E4M3) stage_scales(b, share, s);
  __syncthreads();
  for (int step = 0; step < share.n_steps; step += 2 * kSteps) {
    load_group<kType>(a.w, share, step + kSteps, rows, next);
    multiply_group(step, now);
    load_group<kType>(a.w, share, step + 2 * kSteps, rows, now);
    multiply_group(step + kSteps, next);
  }
  store(b, sum, s);
}

__device__ Block this_block(const KernelArgs& k) {
  SkinnyArgs a = k.a;
  const int head = blockIdx.z % k.n_heads, token = blockIdx.z / k.n_heads * kSkinnyTokens;
  const int row = head * k.rows_per_head;
  a.x += token * a.x_stride + int64_t{head} * (a.x_stride / k.n_heads);
  a.out += token * a.out_stride + int64_t{head} * (a.out_stride / k.n_heads);
  a.w.data = static_cast<const uint8_t*>(a.w.data) + row * a.w.stride * bytes_of(a.w.type);
  a.w.row0 += row;
  a.n_tokens = min(a.n_tokens - token, kSkinnyTokens);
  const bool gated = a.second == Second::kGated;
  const int of_first = (a.w.rows + kRows - 1) / kRows, block = blockIdx.x;
  if (a.second != Second::kBeside || block < of_first)
    return {a, block * (gated ? kRows / 2 : kRows), a.workspace.partial, gated};
  float* const partial = a.workspace.partial + int64_t{gridDim.y} * a.n_tokens * a.w.rows;
  a.w = a.w_2;
  a.out = a.out_2;
  a.out_stride = a.out_2_stride;
  return {a, (block - of_first) * kRows, partial, false};
}

__device__ Share share_of_block(const SkinnyArgs& a, int steps_each) {
  const int n_steps = (a.w.cols + kStep - 1) / kStep, first = blockIdx.y * steps_each;
  return {first * kStep, min(steps_each, n_steps - first)};
}

// `row` points to the lane's first column of the share.
template <Number kType>
__device__ void load_group(const Weight& w, const Share& share, int step,
                           const uint8_t* const (&row)[2], Loaded<kType> (&out)[kGroup<kType>]) {
  const int first = share.first + step * kStep, lane = threadIdx.x % 32;
  const bool whole =
      step + kGroup<kType> <= share.n_steps && first + kGroup<kType> * kStep <= w.cols;
#pragma unroll
  for (int i = 0; i < kGroup<kType>; ++i)
#pragma unroll
    for (int load = 0; load < Loaded<kType>::kLoads; ++load) {
      const int column = i * kStep + column_of<kType>(load, 0);
      const bool valid = whole || (step + i < share.n_steps &&
                                   first + i * kStep + column_of<kType>(load, lane) < w.cols);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        out[i].word[r][load] =
            valid ? load_once_16(row[r] + (step * kStep + column) * bytes_of(kType))
                  : uint4{0, 0, 0, 0};
    }
}

// A thread loads up to kXAtOnce times 8 columns, then stores them: a load does not pass a store
// that may be to the same address, and each would wait for the one before.
template <Number kType, int kTiles>
__device__ void stage_x(const SkinnyArgs& a, const Share& share, Shared<kTiles>& s) {
  const bool aligned = (reinterpret_cast<uintptr_t>(a.x) | a.x_stride * 4) % 16 == 0;
  const int n = share.n_steps * 2 * kTiles * 32;
  for (int first = threadIdx.x; first < n; first += kXAtOnce * kThreads) {
    float v[kXAtOnce][8] = {};
#pragma unroll
    for (int k = 0; k < kXAtOnce; ++k) {
      const XPlace to = x_place<kType, kTiles>(first + k * kThreads, share);
      if (first + k * kThreads >= n || to.token >= a.n_tokens) continue;
      const float* x = a.x + to.token * a.x_stride + to.column;
      if (aligned && to.column + 8 <= a.w.cols) {
        *reinterpret_cast<float4*>(v[k]) = *reinterpret_cast<const float4*>(x);
        *reinterpret_cast<float4*>(v[k] + 4) = *reinterpret_cast<const float4*>(x + 4);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (to.column + e < a.w.cols) v[k][e] = x[e];
      }
      if (a.gain) {
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (to.column + e < a.w.cols) v[k][e] *= s.norm[to.token] * a.gain[to.column + e];
      }
    }
#pragma unroll
    for (int k = 0; k < kXAtOnce; ++k) {
      const XPlace to = x_place<kType, kTiles>(first + k * kThreads, share);
      if (first + k * kThreads >= n) continue;
      s.x[to.step][to.half][to.tile][to.lane] = {
          pack_bf16(v[k][0], v[k][1]), pack_bf16(v[k][2], v[k][3]), pack_bf16(v[k][4], v[k][5]),
          pack_bf16(v[k][6], v[k][7])};
    }
  }
}

// Few tokens share the warps evenly: the squares of each are summed by several of them.
template <int kTiles>
__device__ void find_norms(const SkinnyArgs& a, Shared<kTiles>& s) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool aligned =
      (reinterpret_cast<uintptr_t>(a.x) | a.x_stride * 4 | int64_t{a.w.cols} * 4) % 16 == 0;
  const int warps = max(kWarps / a.n_tokens, 1);            // of a token
  float* const squares_of = reinterpret_cast<float*>(s.x);  // [tokens, warps]
  for (int i = warp; i < a.n_tokens * warps; i += kWarps) {
    const float* x = a.x + i / warps * a.x_stride;
    float squares = 0;
    if (aligned) {
#pragma unroll 8
      for (int c = (i % warps * 32 + lane) * 4; c < a.w.cols; c += warps * 128) {
        const float4 v = *reinterpret_cast<const float4*>(x + c);
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
      }
    } else {
#pragma unroll 8
      for (int c = i % warps * 32 + lane; c < a.w.cols; c += warps * 32) squares += x[c] * x[c];
    }
    squares = warp_sum(squares);
    if (lane == 0) squares_of[i] = squares;
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < a.n_tokens) {
    float squares = 0;
    for (int i = 0; i < warps; ++i) squares += squares_of[threadIdx.x * warps + i];
    s.norm[threadIdx.x] = 1 / sqrtf(squares / a.w.cols + a.eps);
  }
  __syncthreads();
}

// Stages the scales of every step and row. A thread's scales are of one row, and all are loaded
// before the first is stored.
template <int kTiles>
__device__ void stage_scales(const Block& b, const Share& share, Shared<kTiles>& s) {
  constexpr int kStepsAtOnce = kThreads / kRows;
  const int row_of_block = threadIdx.x % kRows, first = threadIdx.x / kRows;
  const Weight& w = b.w(row_of_block % 16 >= 8);
  const int row = min(b.row(row_of_block), w.rows - 1);
  const float* scales = w.scale + (w.row0 + row) / w.block_rows * w.scale_stride;
  float v[kMaxSteps / kStepsAtOnce];
#pragma unroll
  for (int i = 0; i < kMaxSteps / kStepsAtOnce; ++i) {
    const int step = min(first + i * kStepsAtOnce, share.n_steps - 1);
    v[i] = scales[(share.first + step * kStep) / w.block_cols];
  }
#pragma unroll
  for (int i = 0; i < kMaxSteps / kStepsAtOnce; ++i)
    s.scale[first + i * kStepsAtOnce][row_of_block] = v[i];
}

// Words 2 i and 2 i + 1 of the loaded data: 4 columns of BF16, for mma i of half p.
template <Number kType>
__device__ void columns_of(const uint4 (&word)[Loaded<kType>::kLoads], int half, int i,
                           uint32_t& first, uint32_t& second) {
  if constexpr (kType == Number::kF8E4M3) {
    const uint32_t codes = half ? (i ? word[0].w : word[0].z) : (i ? word[0].y : word[0].x);
    widen_e4m3(codes, first, second);
  } else {
    first = i ? word[half].z : word[half].x;
    second = i ? word[half].w : word[half].y;
  }
}

template <Number kType, int kTiles>
__device__ void multiply(int step, const Loaded<kType>& loaded, const Shared<kTiles>& s,
                         float (&sum)[kTiles][4]) {
  float part[kTiles][4] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t weights[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      columns_of<kType>(loaded.word[0], half, i, weights[i][0], weights[i][2]);
      columns_of<kType>(loaded.word[1], half, i, weights[i][1], weights[i][3]);
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint4 x = s.x[step][half][tile][threadIdx.x % 32];
      mma_m16n8k16(part[tile], weights[0], x.x, x.y);
      mma_m16n8k16(part[tile], weights[1], x.z, x.w);
    }
  }
  float scale[2] = {1, 1};
  if constexpr (kType == Number::kF8E4M3) {
    const float* of_rows = &s.scale[step][threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4];
    scale[0] = of_rows[0];
    scale[1] = of_rows[8];
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[tile][i] += scale[i / 2] * part[tile][i];
}

// Element i of sum[tile]: row lane / 4 + i / 2 * 8 of the warp, token 8 tile + lane % 4 * 2 + i
// % 2.
template <int kTiles>
__device__ void store(const Block& b, const float (&sum)[kTiles][4], Shared<kTiles>& s) {
  const SkinnyArgs& a = b.a;
  const bool whole = gridDim.y == 1;
  const int lane = threadIdx.x % 32, row_of_block = threadIdx.x / 32 * 16 + lane / 4;
  const int64_t part = int64_t{a.n_tokens} * b.rows_of_part();
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = tile * 8 + lane % 4 * 2 + i % 2, r = b.row(row_of_block + i / 2 * 8);
      if (token >= a.n_tokens || r >= a.w.rows) continue;
      if (!whole)
        b.partial[blockIdx.y * part + int64_t{token} * b.rows_of_part() +
                  (b.gated ? i / 2 * a.w.rows : 0) + r] = sum[tile][i];
      else if (!b.gated)
        a.out[token * a.out_stride + r] = sum[tile][i];
      else if (i < 2)
        a.out[token * a.out_stride + r] = gated(sum[tile][i], sum[tile][i + 2]);
    }
  if (!whole && is_last_block(a.workspace.counters + blockIdx.x, gridDim.y, s.last)) add_parts(b);
}

__device__ void add_parts(const Block& b) {
  const SkinnyArgs& a = b.a;
  const int64_t part = int64_t{a.n_tokens} * b.rows_of_part();
  const int each = b.gated ? kRows / 2 : kRows, n_rows = min(each, a.w.rows - b.first);
  for (int i = threadIdx.x; i < a.n_tokens * each; i += kThreads) {
    const int token = i / each, row = i % each;
    if (row >= n_rows) continue;
    const float* from = b.partial + int64_t{token} * b.rows_of_part() + b.first + row;
    float sum = 0, up = 0;
#pragma unroll kSplitsAtOnce
    for (unsigned split = 0; split < gridDim.y; ++split) {
      sum += from[split * part];
      if (b.gated) up += from[split * part + a.w.rows];
    }
    a.out[token * a.out_stride + b.first + row] = b.gated ? gated(sum, up) : sum;
  }
}

int row_blocks_of(const SkinnyArgs& a) {
  const auto blocks = [](int64_t rows) { return static_cast<int>((rows + kRows - 1) / kRows); };
  if (a.second == Second::kGated) return blocks(2 * int64_t{a.w.rows});
  return blocks(a.w.rows) + (a.second == Second::kBeside ? blocks(a.w_2.rows) : 0);
}

// Chooses the steps per block that minimize the total time of all waves of blocks: a nearly empty
// last wave takes as long as a full one. A block's first weights, x and scales arrive after
// kBlockSeconds, and the last block of some rows adds kSplitsAtOnce parts in kRoundSeconds.
Plan plan_of(const SkinnyArgs& a) {
  constexpr double kBlockSeconds = 1.35e-6, kRoundSeconds = 0.6e-6;
  constexpr double kUnknownRate = 36e9;  // bytes per second for a multiprocessor
  const int n_steps = (a.w.cols + kStep - 1) / kStep, row_blocks = row_blocks_of(a);
  const double rate =
      a.bytes_per_second > 0 ? a.bytes_per_second / a.n_multiprocessors : kUnknownRate;
  const double of_step = kRows * kStep * double(bytes_of(a.w.type)) * kResident / rate;
  const int rounds_of_outputs = (a.n_tokens * kRows + kThreads - 1) / kThreads;
  const double bytes = double{1} * row_blocks * n_steps * kRows * kStep * bytes_of(a.w.type);
  Plan best = {row_blocks, 0, 0, 0};
  double least = INFINITY;
  for (int steps = kMaxSteps; steps >= 2; --steps) {
    const int splits = (n_steps + steps - 1) / steps, resident = kResident * a.n_multiprocessors;
    const int64_t waves = (int64_t{row_blocks} * splits + resident - 1) / resident;
    const int rounds = splits > 1 ? rounds_of_outputs * ((splits - 1) / kSplitsAtOnce + 1) : 0;
    const double time =
        static_cast<double>(waves) * (min(steps, n_steps) * of_step + kBlockSeconds) +
        rounds * kRoundSeconds;
    if (time >= least) continue;
    least = time;
    best = {row_blocks, splits, steps, bytes / (rate * a.n_multiprocessors) / time};
  }
  return best;
}

template <Number kType, int kTiles, bool kJoins = false>
void launch_tiles(const Stream& stream, const KernelArgs& k, LaunchShape shape) {
  shape.threads = kThreads;
  shape.early = true;
  shape.shared_bytes = int64_t{sizeof(Shared<kTiles>)} + (kJoins ? Joined::bytes(k.parts.n) : 0);
  launch(skinny_kernel<kType, kTiles, kJoins>, shape, stream, k);
}

void launch_skinny(const Stream& stream, const KernelArgs& k, const LaunchShape& shape) {
  const bool fp8 = k.a.w.type == Number::kF8E4M3, few = k.a.n_tokens <= 8;
  check(fp8 || k.a.w.type == Number::kBF16, "weights of skinny_product");
  check(!fp8 || k.a.w.block_cols % kStep == 0, "scale blocks of skinny_product");
  if (k.parts.n > 0)
    return fp8 ? launch_tiles<Number::kF8E4M3, 1, true>(stream, k, shape)
               : launch_tiles<Number::kBF16, 1, true>(stream, k, shape);
  const auto run =
      fp8 ? (few ? &launch_tiles<Number::kF8E4M3, 1> : &launch_tiles<Number::kF8E4M3, 2>)
          : (few ? &launch_tiles<Number::kBF16, 1> : &launch_tiles<Number::kBF16, 2>);
  run(stream, k, shape);
}

}  // namespace

void skinny_product(const Stream& stream, const SkinnyArgs& a) {
  check(a.n_tokens >= 1 && a.n_tokens <= kSkinnyTokens, "tokens of skinny_product");
  check(a.second == Second::kNone || (a.w_2.type == a.w.type && a.w_2.cols == a.w.cols &&
                                      a.w_2.block_cols == a.w.block_cols),
        "second matrix of skinny_product");
  check(a.second != Second::kGated || a.w_2.rows == a.w.rows, "rows of gate and up");
  const Plan plan = plan_of(a);
  check(plan.splits == 1 || plan.row_blocks <= kCounters, "counters of skinny_product");
  launch_skinny(stream, {a, plan.steps_each, 1, 0},
                {.grid_x = plan.row_blocks, .grid_y = plan.splits});
}

int64_t skinny_partials(const SkinnyArgs& a) {
  const Plan plan = plan_of(a);
  const int64_t rows = int64_t{a.w.rows} + (a.second == Second::kNone ? 0 : a.w_2.rows);
  return plan.splits == 1 ? 0 : int64_t{plan.splits} * a.n_tokens * rows;
}

double skinny_share(const SkinnyArgs& a) { return plan_of(a).share; }

void skinny_per_head(const Stream& stream, const PerHeadArgs& p) {
  check(p.w.cols <= kMaxSteps * kStep, "columns of skinny_per_head");
  check(p.parts.n == 0 || (p.n_tokens <= kJoinTokens && p.w.cols <= kMaxJoinedCols),
        "parts of skinny_per_head");
  Weight w = p.w;
  w.data = static_cast<const uint8_t*>(w.data) + p.first_row * w.stride * bytes_of(w.type);
  w.row0 += p.first_row;
  w.rows = p.out_cols;
  const int64_t x_stride = p.x_stride * p.n_heads, out_stride = p.out_stride * p.n_heads;
  const int tiles_at_once = kMaxGridYz / p.n_heads, tokens_at_once = tiles_at_once * kSkinnyTokens;
  for (int first = 0; first < p.n_tokens; first += tokens_at_once) {
    const int n_tokens = min(p.n_tokens - first, tokens_at_once);
    const int n_tiles = (n_tokens + kSkinnyTokens - 1) / kSkinnyTokens;
    const SkinnyArgs a = {.x = p.x + first * x_stride,
                          .w = w,
                          .out = p.out + first * out_stride,
                          .x_stride = x_stride,
                          .out_stride = out_stride,
                          .n_tokens = n_tokens,
                          .workspace = {},
                          .n_multiprocessors = 1};
    launch_skinny(stream, {a, kMaxSteps, p.n_heads, p.rows_per_head, p.parts},
                  {.grid_x = (p.out_cols + kRows - 1) / kRows, .grid_z = n_tiles * p.n_heads});
  }
}

}  // namespace tandem::gpu
