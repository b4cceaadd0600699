// A block multiplies 8 tokens by 4 experts over a share of the columns. The last block of these
// tokens adds the shares and chooses: a warp for each token, whose lane l handles experts l + 32 i.
// Scores are in shared memory.
#include "core/invariant.h"
#include "device.h"
#include "gpu_kernels/products/exact_tile.h"
#include "gpu_kernels/reduce.h"
#include "gpu_kernels/router.h"
#include "gpu_kernels/simulated_row.h"

namespace tandem::gpu {
namespace {

using exact::kColumns, exact::kRows, exact::kThreads, exact::kTokens, exact::kWarps;

static_assert(kTokens == kWarps);

// In shared memory, [kWarps] times scratch_floats() follow.
struct Shared {
  exact::Shared product;
  bool last;
};

// Shared memory of a warp.
struct Scratch {
  float* score;   // [n_experts], becomes the weights
  float* choice;  // [n_experts], used for selection; -inf once excluded
  float* group;   // [n_groups]
};
__host__ __device__ int scratch_floats(const RouterArgs& a) { return 2 * a.n_experts + a.n_groups; }

struct KernelArgs {
  RouterArgs a;
  int columns_each;  // of a share
};

__device__ int lane() { return static_cast<int>(threadIdx.x % 32); }

// A value and its index.
struct Found {
  float value;
  int at;
};

// The best of all lanes by `better`, a strict order of values and indices.
template <class Better>
__device__ Found best_of_warp(Found mine, Better better) {
  for (int distance = 16; distance > 0; distance /= 2) {
    const Found other = {__shfl_xor_sync(~0u, mine.value, distance),
                         __shfl_xor_sync(~0u, mine.at, distance)};
    if (better(other, mine)) mine = other;
  }
  return mine;
}

// The largest value, the first of equals; any index if all are NaN.
__device__ Found argmax_of_warp(const float* values, int n) {
  const auto better = [](const Found& a, const Found& b) {
    return a.value > b.value || (a.value == b.value && a.at < b.at);
  };
  Found best = {-INFINITY, n - 1};
  for (int i = lane(); i < n; i += 32)
    if (better({values[i], i}, best)) best = {values[i], i};
  return best_of_warp(best, better);
}

// The smallest value, the last of equals.
__device__ Found last_argmin_of_warp(const float* values, int n) {
  const auto better = [](const Found& a, const Found& b) {
    return a.value < b.value || (a.value == b.value && a.at > b.at);
  };
  Found best = {INFINITY, -1};
  for (int i = lane(); i < n; i += 32)
    if (better({values[i], i}, best)) best = {values[i], i};
  return best_of_warp(best, better);
}

__device__ void score_experts(const RouterArgs& a, const float* logits, const Scratch& s) {
  if (a.scoring == RouterScoring::kSigmoid) {
    for (int e = lane(); e < a.n_experts; e += 32) s.score[e] = 1 / (1 + expf(-logits[e]));
    return;
  }
  float max = -INFINITY, sum = 0;
  for (int e = lane(); e < a.n_experts; e += 32) max = fmaxf(max, logits[e]);
  max = warp_max(max);
  for (int e = lane(); e < a.n_experts; e += 32) sum += s.score[e] = expf(logits[e] - max);
  sum = warp_sum(sum);
  for (int e = lane(); e < a.n_experts; e += 32) s.score[e] /= sum;
}

__device__ float score_of_group(const float* choice, int size, GroupScore kind) {
  float first = -INFINITY, second = -INFINITY;
  for (int i = 0; i < size; ++i) {
    second = fmaxf(second, fminf(choice[i], first));
    first = fmaxf(first, choice[i]);
  }
  return kind == GroupScore::kSumOfBestTwo && size > 1 ? first + second : first;
}

// Excludes the experts of the worst groups until n_active_groups are left.
__device__ void keep_best_groups(const RouterArgs& a, const Scratch& s) {
  const int size = a.n_experts / a.n_groups;
  for (int g = lane(); g < a.n_groups; g += 32)
    s.group[g] = score_of_group(s.choice + g * size, size, a.group_score);
  __syncwarp();
  for (int left = a.n_groups; left > a.n_active_groups; --left) {
    const int worst = last_argmin_of_warp(s.group, a.n_groups).at;
    __syncwarp();
    for (int i = lane(); i < size; i += 32) s.choice[worst * size + i] = -INFINITY;
    if (lane() == 0) s.group[worst] = INFINITY;
    __syncwarp();
  }
}

// The experts that replace those of the token; null: the router chooses.
__device__ const int32_t* simulated_ids(const RouterArgs& a, int64_t token) {
  const SimulatedRouterRows& s = a.simulated;
  if (!s.ids) return nullptr;
  return s.ids + a.n_active * simulated_row(s.first_token + token * s.token_stride,
                                            s.positions[token], s.n_rows, s.varies);
}

__device__ void choose(const RouterArgs& a, int64_t token, const Scratch& s) {
  score_experts(a, a.logits.data + token * a.logits.stride, s);
  for (int e = lane(); e < a.n_experts; e += 32)
    s.choice[e] = s.score[e] + (a.bias ? a.bias[e] : 0);
  __syncwarp();
  if (a.group_score != GroupScore::kNone) keep_best_groups(a, s);

  float* weights = a.weights.data + token * a.weights.stride;
  int32_t* ids = a.ids + token * a.ids_stride;
  const int32_t* simulated = simulated_ids(a, token);
  float sum = 0;
  for (int k = 0; k < a.n_active; ++k) {
    const int best = argmax_of_warp(s.choice, a.n_experts).at;
    sum += s.score[best];
    __syncwarp();
    if (lane() == 0) {
      s.choice[best] = -INFINITY;
      ids[k] = simulated ? simulated[k] : best;
      weights[k] = s.score[best];
      if (a.uses) atomicAdd(a.uses + ids[k], 1u);
    }
    __syncwarp();
  }
  if (lane() != 0) return;
  const float scale = a.normalize ? a.scale / (sum + 1e-20f) : a.scale;
  for (int k = 0; k < a.n_active; ++k) weights[k] *= scale;
}

// Writes this block's share of the logits.
template <Number kType>
__device__ void multiply(const KernelArgs& k, int first_token, Shared& s) {
  const RouterArgs& a = k.a;
  const int first_row = blockIdx.x * kRows, begin = blockIdx.z * k.columns_each;
  const float sum = exact::sums_of_block<kType>({a.x, a.w, nullptr, a.x_stride, 0, a.tokens},
                                                first_row, first_token, begin,
                                                min(begin + k.columns_each, a.w.cols), s.product);
  const int row = first_row + threadIdx.x / kTokens, token = first_token + threadIdx.x % kTokens;
  if (threadIdx.x >= 32 || row >= a.n_experts || token >= a.tokens) return;
  if (gridDim.z == 1)
    a.logits.data[token * a.logits.stride + row] = sum;
  else
    a.workspace.partial[(int64_t{blockIdx.z} * a.tokens + token) * a.n_experts + row] = sum;
}

// All threads of a block add the shares of the logits of its tokens.
__device__ void add_shares(const RouterArgs& a, int first_token) {
  const int n = min(a.tokens - first_token, kTokens) * a.n_experts;
  for (int i = threadIdx.x; i < n; i += kThreads) {
    const int64_t token = first_token + i / a.n_experts;
    const int e = i % a.n_experts;
    const float* from = a.workspace.partial + token * a.n_experts + e;
    float sum = 0;
#pragma unroll 8
    for (unsigned share = 0; share < gridDim.z; ++share)
      sum += from[int64_t{share} * a.tokens * a.n_experts];
    a.logits.data[token * a.logits.stride + e] = sum;
  }
  __syncthreads();
}

template <Number kType>
__global__ void __launch_bounds__(kThreads, 2) route_kernel(const __grid_constant__ KernelArgs k) {
  begin_early();
  const RouterArgs& a = k.a;
  auto& s = shared_memory<Shared>();
  const int first_token = blockIdx.y * kTokens, warp = threadIdx.x / 32, token = first_token + warp;
  if (a.x) {
    multiply<kType>(k, first_token, s);
    if (!is_last_block(a.workspace.counters + blockIdx.y, gridDim.x * gridDim.z, s.last)) return;
  }
  if (a.x && gridDim.z > 1) add_shares(a, first_token);
  if (token >= a.tokens) return;
  float* const scratch = reinterpret_cast<float*>(&s + 1) + warp * scratch_floats(a);
  choose(a, token, {scratch, scratch + a.n_experts, scratch + 2 * a.n_experts});
}

int n_tiles(int n, int of) { return (n + of - 1) / of; }

// Rounds of kColumns columns for each share, so that the GPU has about two blocks a multiprocessor.
int columns_each(const RouterArgs& a) {
  const int rounds = max(n_tiles(a.w.cols, kColumns), 1);
  const int64_t blocks = int64_t{n_tiles(a.n_experts, kRows)} * n_tiles(a.tokens, kTokens) * rounds;
  const int64_t each = (blocks + 2 * a.n_multiprocessors - 1) / (2 * a.n_multiprocessors);
  return static_cast<int>(min(max(each, int64_t{1}), int64_t{rounds})) * kColumns;
}

int n_shares(const RouterArgs& a) { return a.x ? max(n_tiles(a.w.cols, columns_each(a)), 1) : 1; }

}  // namespace

int64_t route_partials(const RouterArgs& a) {
  const int shares = n_tiles(a.w.cols, columns_each(a));
  return shares > 1 ? int64_t{shares} * a.tokens * a.n_experts : 0;
}

void route(const Stream& stream, const RouterArgs& a) {
  if (a.tokens == 0) return;
  const int token_tiles = n_tiles(a.tokens, kTokens);
  check(!a.x || token_tiles <= kCounters, "tokens of route");
  check(!a.x || a.w.type != Number::kF8E4M3 || a.w.block_cols % 4 == 0, "scale blocks of route");
  launch(a.w.type == Number::kF8E4M3 ? route_kernel<Number::kF8E4M3>
         : a.w.type == Number::kBF16 ? route_kernel<Number::kBF16>
                                     : route_kernel<Number::kF32>,
         {.grid_x = a.x ? n_tiles(a.n_experts, kRows) : 1,
          .grid_y = token_tiles,
          .grid_z = n_shares(a),
          .threads = kThreads,
          .shared_bytes =
              static_cast<int64_t>(sizeof(Shared)) + int64_t{kWarps} * scratch_floats(a) * 4,
          .early = true},
         stream, {a, columns_each(a)});
}

}  // namespace tandem::gpu
