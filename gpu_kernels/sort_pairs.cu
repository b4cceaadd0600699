// One block sorts the pairs of a step. Each warp has a segment of them, 32 at a time: ballots find
// the lanes with the same expert, so that equal pairs keep their order without atomics. Bound by
// the two passes of 16 turns each that a warp needs for 512 tokens of R1.
#include "device.h"
#include "gpu_kernels/kernels.h"

namespace tandem::gpu {
namespace {

constexpr int kSegments = 8;     // one for each of the first warps
constexpr int kChunk = 4096;     // pairs at a time
constexpr int kLoadsAtOnce = 8;  // of a thread

struct Shared {
  int16_t ids[kChunk];
  int count[kSegments][kMaxExperts];  // pairs of a segment, then the row of its next one
  int next[kMaxExperts];              // row of the expert's next pair
};

// The number of pairs from `first` on whose ids are now in shared memory.
__device__ int load_chunk(const SortPairsArgs& a, Shared& s, int first) {
  const int n = min(kChunk, a.tokens * a.n_active - first), n_threads = blockDim.x;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += kLoadsAtOnce * n_threads) {
    int id[kLoadsAtOnce];
#pragma unroll
    for (int k = 0; k < kLoadsAtOnce; ++k) {
      const int pair = first + min(i + k * n_threads, n - 1);
      id[k] = a.ids[pair / a.n_active * a.ids_stride + pair % a.n_active];
    }
#pragma unroll
    for (int k = 0; k < kLoadsAtOnce; ++k)
      if (i + k * n_threads < n) s.ids[i + k * n_threads] = static_cast<int16_t>(id[k]);
  }
  __syncthreads();
  return n;
}

// The lanes whose id is this lane's.
__device__ unsigned lanes_with(int id) {
  const unsigned key = id < 0 ? kMaxExperts : id;
  unsigned lanes = ~0u;
#pragma unroll
  for (unsigned bit = 1; bit <= kMaxExperts; bit *= 2) {
    const unsigned set = __ballot_sync(~0u, (key & bit) != 0);
    lanes &= key & bit ? set : ~set;
  }
  return lanes;
}

// Calls visit(i, id, before, all) for the pairs i of this warp's segment, 32 at a time by all
// lanes: `all` of the 32 have the same id, and `before` of them come before i. Lanes past the end
// have id -1, as pairs without an expert do.
template <class Visit>
__device__ void for_segment(const Shared& s, int n, Visit visit) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int each = (n + kSegments * 32 - 1) / (kSegments * 32) * 32;
  const int end = warp < kSegments ? min(n, (warp + 1) * each) : 0;
  for (int turn = warp * each; turn < end; turn += 32) {
    const int i = turn + lane, id = i < end ? s.ids[i] : -1;
    const unsigned lanes = lanes_with(id);
    visit(i, id, __popc(lanes & ((1u << lane) - 1)), __popc(lanes));
    __syncwarp();
  }
}

// Counts the pairs of each warp's segment.
__device__ void count_segment(Shared& s, int n) {
  for (int segment = 0; segment < kSegments; ++segment) s.count[segment][threadIdx.x] = 0;
  __syncthreads();
  for_segment(s, n, [&](int, int id, int before, int all) {
    if (id >= 0 && before == 0) s.count[threadIdx.x / 32][id] += all;
  });
  __syncthreads();
}

__global__ void __launch_bounds__(kMaxExperts)
    sort_pairs_kernel(const __grid_constant__ SortPairsArgs a) {
  Shared& s = shared_memory<Shared>();
  const int expert = threadIdx.x, n_pairs = a.tokens * a.n_active;
  int total = 0;
  for (int first = 0; first < n_pairs; first += kChunk) {
    count_segment(s, load_chunk(a, s, first));
    for (const auto& count : s.count) total += count[expert];
  }
  s.next[expert] = total;
  __syncthreads();
  int row = 0;
#pragma unroll 8
  for (int e = 0; e < expert; ++e) row += s.next[e];
  __syncthreads();
  s.next[expert] = row;
  if (expert < a.n_experts) a.offsets[expert] = row;
  if (expert == a.n_experts - 1) a.offsets[a.n_experts] = row + total;

  for (int first = 0; first < n_pairs; first += kChunk) {
    const int n = n_pairs > kChunk ? load_chunk(a, s, first) : n_pairs;
    if (n_pairs > kChunk) count_segment(s, n);
    int next = s.next[expert];
    for (auto& count : s.count) {
      const int n_here = count[expert];
      count[expert] = next;
      next += n_here;
    }
    s.next[expert] = next;
    __syncthreads();
    for_segment(s, n, [&](int i, int id, int before, int all) {
      const int pair = first + i, segment = threadIdx.x / 32;
      const int to = id < 0 ? -1 : s.count[segment][id] + before;
      __syncwarp();
      if (i < n) a.row_of[pair] = to;
      if (id < 0) return;
      a.tokens_of_rows[to] = pair / a.n_active;
      if (before == 0) s.count[segment][id] += all;
    });
  }
}

}  // namespace

void sort_pairs(const Stream& stream, const SortPairsArgs& a) {
  if (a.tokens == 0) return;
  launch(sort_pairs_kernel,
         {.threads = max(kSegments * 32, (a.n_experts + 31) / 32 * 32),
          .shared_bytes = sizeof(Shared)},
         stream, a);
}

}  // namespace tandem::gpu
