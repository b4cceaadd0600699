// A warp chooses the experts of one token. Scores are in shared memory; lane l handles experts l, l
// + 32, ..
#include "device.h"
#include "gpu_kernels/kernels.h"
#include "gpu_kernels/reduce.h"

namespace tandem::gpu {
namespace {

struct Shared {
  float score[kMaxExperts];   // becomes the weights
  float choice[kMaxExperts];  // used for selection; -inf once excluded
  float group[kMaxExperts];
};

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
  for (int i = threadIdx.x; i < n; i += 32)
    if (better({values[i], i}, best)) best = {values[i], i};
  return best_of_warp(best, better);
}

// The smallest value, the last of equals.
__device__ Found last_argmin_of_warp(const float* values, int n) {
  const auto better = [](const Found& a, const Found& b) {
    return a.value < b.value || (a.value == b.value && a.at > b.at);
  };
  Found best = {INFINITY, -1};
  for (int i = threadIdx.x; i < n; i += 32)
    if (better({values[i], i}, best)) best = {values[i], i};
  return best_of_warp(best, better);
}

__device__ void score_experts(const RouterArgs& a, const float* logits, Shared& s) {
  if (a.scoring == RouterScoring::kSigmoid) {
    for (int e = threadIdx.x; e < a.n_experts; e += 32) s.score[e] = 1 / (1 + expf(-logits[e]));
    return;
  }
  float max = -INFINITY, sum = 0;
  for (int e = threadIdx.x; e < a.n_experts; e += 32) max = fmaxf(max, logits[e]);
  max = warp_max(max);
  for (int e = threadIdx.x; e < a.n_experts; e += 32) sum += s.score[e] = expf(logits[e] - max);
  sum = warp_sum(sum);
  for (int e = threadIdx.x; e < a.n_experts; e += 32) s.score[e] /= sum;
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
__device__ void keep_best_groups(const RouterArgs& a, Shared& s) {
  const int size = a.n_experts / a.n_groups;
  for (int g = threadIdx.x; g < a.n_groups; g += 32)
    s.group[g] = score_of_group(s.choice + g * size, size, a.group_score);
  __syncwarp();
  for (int left = a.n_groups; left > a.n_active_groups; --left) {
    const int worst = last_argmin_of_warp(s.group, a.n_groups).at;
    __syncwarp();
    for (int i = threadIdx.x; i < size; i += 32) s.choice[worst * size + i] = -INFINITY;
    if (threadIdx.x == 0) s.group[worst] = INFINITY;
    __syncwarp();
  }
}

__global__ void __launch_bounds__(32) route_kernel(const __grid_constant__ RouterArgs a) {
  Shared& s = shared_memory<Shared>();
  const int64_t token = blockIdx.x;
  score_experts(a, a.logits.data + token * a.logits.stride, s);
  for (int e = threadIdx.x; e < a.n_experts; e += 32)
    s.choice[e] = s.score[e] + (a.bias ? a.bias[e] : 0);
  __syncwarp();
  if (a.group_score != GroupScore::kNone) keep_best_groups(a, s);

  float* weights = a.weights.data + token * a.weights.stride;
  int32_t* ids = a.ids + token * a.ids_stride;
  float sum = 0;
  for (int k = 0; k < a.n_active; ++k) {
    const int best = argmax_of_warp(s.choice, a.n_experts).at;
    sum += s.score[best];
    __syncwarp();
    if (threadIdx.x == 0) {
      s.choice[best] = -INFINITY;
      const int64_t place = token * a.n_active + k;
      ids[k] =
          a.simulated_ranks > 0
              ? static_cast<int32_t>(place % a.simulated_ranks * a.n_experts / a.simulated_ranks)
              : best;
      weights[k] = s.score[best];
    }
    __syncwarp();
  }
  if (threadIdx.x != 0) return;
  const float scale = a.normalize ? a.scale / (sum + 1e-20f) : a.scale;
  for (int k = 0; k < a.n_active; ++k) weights[k] *= scale;
}

}  // namespace

void route(const Stream& stream, const RouterArgs& a) {
  if (a.tokens == 0) return;
  launch(route_kernel, {.grid_x = a.tokens, .threads = 32, .shared_bytes = sizeof(Shared)}, stream,
         a);
}

}  // namespace tandem::gpu
