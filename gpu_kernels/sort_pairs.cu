// One block sorts the pairs of a step: thread e finds those of expert e, in order, by scanning all
// pairs in shared memory, where a warp reads one word at a time. For 512 tokens of R1 that is 4,096
// steps, about 10 us, without atomics or a second kernel.
#include "device.h"
#include "gpu_kernels/kernels.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = kMaxExperts;
constexpr int kChunk = 4096;  // pairs at a time

struct Shared {
  int16_t ids[kChunk];
  int count[kMaxExperts];
};

// Calls visit(pair) for this thread's pairs in order.
template <class Visit>
__device__ void for_own_pairs(const SortPairsArgs& a, Shared& s, Visit visit) {
  const int n = a.tokens * a.n_active;
  for (int first = 0; first < n; first += kChunk) {
    const int here = min(kChunk, n - first);
    __syncthreads();
    for (int i = threadIdx.x; i < here; i += blockDim.x) {
      const int pair = first + i;
      s.ids[i] = static_cast<int16_t>(a.ids[pair / a.n_active * a.ids_stride + pair % a.n_active]);
    }
    __syncthreads();
    for (int i = 0; i < here; ++i)
      if (s.ids[i] == static_cast<int>(threadIdx.x)) visit(first + i);
  }
}

__global__ void __launch_bounds__(kThreads)
    sort_pairs_kernel(const __grid_constant__ SortPairsArgs a) {
  Shared& s = shared_memory<Shared>();
  const int expert = threadIdx.x;
  int count = 0;
  for_own_pairs(a, s, [&](int) { ++count; });
  s.count[expert] = count;
  __syncthreads();
  int row = 0;
  for (int e = 0; e < expert; ++e) row += s.count[e];
  for (int pair = threadIdx.x; pair < a.tokens * a.n_active; pair += blockDim.x)
    if (a.ids[pair / a.n_active * a.ids_stride + pair % a.n_active] < 0) a.row_of[pair] = -1;
  if (expert < a.n_experts) a.offsets[expert] = row;
  if (expert == a.n_experts - 1) a.offsets[a.n_experts] = row + count;
  for_own_pairs(a, s, [&](int pair) {
    a.row_of[pair] = row;
    a.tokens_of_rows[row] = pair / a.n_active;
    ++row;
  });
}

}  // namespace

void sort_pairs(const Stream& stream, const SortPairsArgs& a) {
  if (a.tokens == 0) return;
  launch(sort_pairs_kernel,
         {.threads = (a.n_experts + 31) / 32 * 32, .shared_bytes = sizeof(Shared)}, stream, a);
}

}  // namespace tandem::gpu
