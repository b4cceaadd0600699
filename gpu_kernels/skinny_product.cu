// Products of few tokens. w is read once, 16 bytes per lane directly into registers, and is the A
// operand of the tensor cores; tokens are the 8 columns of B. The sum allows any order of columns,
// so a lane multiplies whichever 16 bytes it loads, and x is stored in shared memory to match.
// Where w has too few rows to fill the GPU, blocks split its columns.
#include "core/invariant.h"
#include "device.h"
#include "gpu_kernels/e4m3.h"
#include "gpu_kernels/skinny_per_head.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRows = kWarps * 16;  // rows of w per block
constexpr int kStep = 64;           // columns that a warp multiplies at a time
constexpr int kMaxSteps = 16;       // per block
constexpr int kResident = 2;        // blocks per multiprocessor
constexpr int kOverheadSteps = 3;   // fixed time of a block, in steps

// Steps whose weights are loaded while the same number is multiplied: 128 bytes per lane.
template <Number kType>
constexpr int kGroup = kType == Number::kF8E4M3 ? 4 : 2;

// x of step s, half p, tile i of 8 tokens, lane l: 8 columns of token 8 i + l / 4.
template <int kTiles>
struct Shared {
  uint4 x[kMaxSteps][2][kTiles][32];
  float scale[kMaxSteps][kRows];
  bool last;
};

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
};

// blockIdx.z selects a head and up to 16 of its tokens.
struct KernelArgs {
  SkinnyArgs a;  // for head 0
  int steps_each;
  int n_heads, rows_per_head;
};

// The first of the 8 columns that a lane multiplies in half p of a step.
template <Number kType>
__device__ int column_of(int half, int lane) {
  return kType == Number::kF8E4M3 ? lane % 4 * 16 + half * 8 : half * 32 + lane % 4 * 8;
}

__device__ SkinnyArgs args_of_block(const KernelArgs& k);
__device__ Share share_of_block(const SkinnyArgs& a, int steps_each);
template <Number kType>
__device__ void load_group(const Weight& w, const Share& share, int step,
                           const uint8_t* const (&row)[2], Loaded<kType> (&out)[kGroup<kType>]);
template <Number kType, int kTiles>
__device__ void stage_x(const SkinnyArgs& a, const Share& share, Shared<kTiles>& s);
template <int kTiles>
__device__ void stage_scales(const Weight& w, const Share& share, Shared<kTiles>& s);
template <Number kType, int kTiles>
__device__ void multiply(int step, const Loaded<kType>& loaded, const Shared<kTiles>& s,
                         float (&sum)[kTiles][4]);
template <int kTiles>
__device__ void store(const SkinnyArgs& a, int row, const float (&sum)[kTiles][4],
                      Shared<kTiles>& s);
__device__ void add_parts(const SkinnyArgs& a);

template <Number kType, int kTiles>
__global__ void __launch_bounds__(kThreads, 2) skinny_kernel(const __grid_constant__ KernelArgs k) {
  const SkinnyArgs a = args_of_block(k);
  auto& s = shared_memory<Shared<kTiles>>();
  const Share share = share_of_block(a, k.steps_each);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = blockIdx.x * kRows + warp * 16 + lane / 4;
  const uint8_t* rows[2];
  for (int i = 0; i < 2; ++i)  // missing rows are copies and not stored
    rows[i] = static_cast<const uint8_t*>(a.w.data) + (min(row + 8 * i, a.w.rows - 1) * a.w.stride +
                                                       share.first + column_of<kType>(0, lane)) *
                                                          bytes_of(kType);

  constexpr int kSteps = kGroup<kType>;
  Loaded<kType> now[kSteps], next[kSteps];
  float sum[kTiles][4] = {};
  const auto multiply_group = [&](int step, const Loaded<kType>(&loaded)[kSteps]) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      if (step + i < share.n_steps) multiply<kType>(step + i, loaded[i], s, sum);
  };
  load_group<kType>(a.w, share, 0, rows, now);
  stage_x<kType>(a, share, s);
  if constexpr (kType == Number::kF8E4M3) stage_scales(a.w, share, s);
  __syncthreads();
  for (int step = 0; step < share.n_steps; step += 2 * kSteps) {
    load_group<kType>(a.w, share, step + kSteps, rows, next);
    multiply_group(step, now);
    load_group<kType>(a.w, share, step + 2 * kSteps, rows, now);
    multiply_group(step + kSteps, next);
  }
  store(a, row, sum, s);
}

__device__ SkinnyArgs args_of_block(const KernelArgs& k) {
  SkinnyArgs a = k.a;
  const int head = blockIdx.z % k.n_heads, token = blockIdx.z / k.n_heads * kSkinnyTokens;
  const int row = head * k.rows_per_head;
  a.x += token * a.x_stride + int64_t{head} * (a.x_stride / k.n_heads);
  a.out += token * a.out_stride + int64_t{head} * (a.out_stride / k.n_heads);
  a.w.data = static_cast<const uint8_t*>(a.w.data) + row * a.w.stride * bytes_of(a.w.type);
  a.w.row0 += row;
  a.n_tokens = min(a.n_tokens - token, kSkinnyTokens);
  return a;
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

template <Number kType, int kTiles>
__device__ void stage_x(const SkinnyArgs& a, const Share& share, Shared<kTiles>& s) {
  const bool aligned = (reinterpret_cast<uintptr_t>(a.x) | a.x_stride * 4) % 16 == 0;
  for (int i = threadIdx.x; i < share.n_steps * 2 * kTiles * 32; i += kThreads) {
    const int lane = i % 32, tile = i / 32 % kTiles, half = i / (32 * kTiles) % 2;
    const int step = i / (64 * kTiles), token = tile * 8 + lane / 4;
    const int column = share.first + step * kStep + column_of<kType>(half, lane);
    const float* x = a.x + token * a.x_stride + column;
    float v[8] = {};
    if (token < a.n_tokens) {
      if (aligned && column + 8 <= a.w.cols) {
        *reinterpret_cast<float4*>(v) = *reinterpret_cast<const float4*>(x);
        *reinterpret_cast<float4*>(v + 4) = *reinterpret_cast<const float4*>(x + 4);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (column + e < a.w.cols) v[e] = x[e];
      }
    }
    s.x[step][half][tile][lane] = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                                   pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
  }
}

// Stages the scales of every step and row: a warp reads eight rows at a time.
template <int kTiles>
__device__ void stage_scales(const Weight& w, const Share& share, Shared<kTiles>& s) {
  for (int i = threadIdx.x; i < share.n_steps * kRows; i += kThreads) {
    const int step = i / kRows,
              row = min(static_cast<int>(blockIdx.x) * kRows + i % kRows, w.rows - 1);
    s.scale[step][i % kRows] = w.scale[(w.row0 + row) / w.block_rows * w.scale_stride +
                                       (share.first + step * kStep) / w.block_cols];
  }
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

// Element i of sum[tile]: row lane / 4 + i / 2 * 8 of the warp, token 8 tile + lane % 4 * 2 + i %
// 2.
template <int kTiles>
__device__ void store(const SkinnyArgs& a, int row, const float (&sum)[kTiles][4],
                      Shared<kTiles>& s) {
  const bool whole = gridDim.y == 1;
  float* out = whole ? a.out : a.workspace.partial + int64_t{blockIdx.y} * a.n_tokens * a.w.rows;
  const int64_t stride = whole ? a.out_stride : a.w.rows;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = tile * 8 + threadIdx.x % 4 * 2 + i % 2, r = row + i / 2 * 8;
      if (token < a.n_tokens && r < a.w.rows) out[token * stride + r] = sum[tile][i];
    }
  if (whole) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t* counter = a.workspace.counters + blockIdx.x;
    s.last = arrive(counter) + 1 == gridDim.y;
    if (s.last) *counter = 0;
  }
  __syncthreads();
  if (s.last) add_parts(a);
}

__device__ void add_parts(const SkinnyArgs& a) {
  const int64_t part = int64_t{a.n_tokens} * a.w.rows;
  const int first = blockIdx.x * kRows, n_rows = min(kRows, a.w.rows - first);
  for (int i = threadIdx.x; i < a.n_tokens * kRows; i += kThreads) {
    const int token = i / kRows, row = i % kRows;
    if (row >= n_rows) continue;
    const float* from = a.workspace.partial + int64_t{token} * a.w.rows + first + row;
    float sum = 0;
#pragma unroll 4
    for (unsigned split = 0; split < gridDim.y; ++split) sum += from[split * part];
    a.out[token * a.out_stride + first + row] = sum;
  }
}

// Chooses the steps per block that minimize the total time of all waves of blocks: a nearly empty
// last wave takes as long as a full one.
Plan plan_of(const Weight& w, int n_multiprocessors) {
  const int n_steps = (w.cols + kStep - 1) / kStep, row_blocks = (w.rows + kRows - 1) / kRows;
  Plan best = {row_blocks, 0, 0};
  int64_t least = INT64_MAX;
  for (int steps = kMaxSteps; steps >= 2; --steps) {
    const int splits = (n_steps + steps - 1) / steps, resident = kResident * n_multiprocessors;
    const int64_t waves = (int64_t{row_blocks} * splits + resident - 1) / resident;
    const int64_t time = waves * (min(steps, n_steps) + kOverheadSteps);
    if (time < least) least = time, best.splits = splits, best.steps_each = steps;
  }
  return best;
}

template <Number kType, int kTiles>
void launch_tiles(const Stream& stream, const KernelArgs& k, LaunchShape shape) {
  shape.threads = kThreads;
  shape.shared_bytes = sizeof(Shared<kTiles>);
  launch(skinny_kernel<kType, kTiles>, shape, stream, k);
}

void launch_skinny(const Stream& stream, const KernelArgs& k, const LaunchShape& shape) {
  const bool fp8 = k.a.w.type == Number::kF8E4M3, few = k.a.n_tokens <= 8;
  check(fp8 || k.a.w.type == Number::kBF16, "weights of skinny_product");
  check(!fp8 || k.a.w.block_cols % kStep == 0, "scale blocks of skinny_product");
  const auto run =
      fp8 ? (few ? &launch_tiles<Number::kF8E4M3, 1> : &launch_tiles<Number::kF8E4M3, 2>)
          : (few ? &launch_tiles<Number::kBF16, 1> : &launch_tiles<Number::kBF16, 2>);
  run(stream, k, shape);
}

}  // namespace

void skinny_product(const Stream& stream, const SkinnyArgs& a) {
  check(a.n_tokens >= 1 && a.n_tokens <= kSkinnyTokens, "tokens of skinny_product");
  const Plan plan = plan_of(a.w, a.n_multiprocessors);
  check(plan.splits == 1 || plan.row_blocks <= kCounters, "counters of skinny_product");
  launch_skinny(stream, {a, plan.steps_each, 1, 0},
                {.grid_x = plan.row_blocks, .grid_y = plan.splits});
}

int64_t skinny_partials(const Weight& w, int n_tokens, int n_multiprocessors) {
  const Plan plan = plan_of(w, n_multiprocessors);
  return plan.splits == 1 ? 0 : int64_t{plan.splits} * n_tokens * w.rows;
}

void skinny_per_head(const Stream& stream, const PerHeadArgs& p) {
  check(p.w.cols <= kMaxSteps * kStep, "columns of skinny_per_head");
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
    launch_skinny(stream, {a, kMaxSteps, p.n_heads, p.rows_per_head},
                  {.grid_x = (p.out_cols + kRows - 1) / kRows, .grid_z = n_tiles * p.n_heads});
  }
}

}  // namespace tandem::gpu
