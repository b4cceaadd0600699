// Copies: one block for each token and rank, or for each row.
#include "device.h"
#include "gpu_kernels/exchange/parcels.h"
#include "gpu_kernels/exchange/row_words.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256;

struct Shared {
  int n_of_warp[kThreads / 32];
};

// The rank that computes the k-th expert of a token, or -1.
__device__ int rank_of(const ChooseRanksArgs& a, const int32_t* ids, uint32_t hash, int k) {
  const int32_t id = ids[k];
  if (id < 0) return -1;
  const int32_t* const owners = a.owners + int64_t{id} * a.n_ranks;
  int n = 0;
  while (n < a.n_ranks && owners[n] >= 0) ++n;
  return n > 0 ? nearest_replica(owners, n, a.rank, a.hosts, hash, id) : -1;
}

// The place of a rank's first parcel.
__device__ int first_of(const int32_t* counts, int n_each, int rank) {
  if (n_each > 0) return rank * n_each;
  int n = 0;
  for (int r = 0; r < rank; ++r) n += counts[r];
  return n;
}

// One block for each rank.
__global__ void __launch_bounds__(kThreads)
    choose_kernel(const __grid_constant__ ChooseRanksArgs a) {
  Shared& s = shared_memory<Shared>();
  const int rank = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int n = 0;
  for (int first = 0; first < a.tokens; first += kThreads) {
    const int64_t token = first + threadIdx.x;
    bool goes = false;
    if (token < a.tokens) {
      const int32_t* const ids = a.ids + token * a.ids_stride;
      const uint32_t hash = hash_of_choice(ids, a.n_active);
      for (int k = 0; k < a.n_active; ++k) goes |= rank_of(a, ids, hash, k) == rank;
    }
    const unsigned going = __ballot_sync(~0u, goes);
    if (lane == 0) s.n_of_warp[warp] = __popc(going);
    __syncthreads();
    int before = n + __popc(going & ((1u << lane) - 1));
    for (int w = 0; w < warp; ++w) before += s.n_of_warp[w];
    if (token < a.tokens) a.slots[token * a.n_ranks + rank] = goes ? before : -1;
    for (int w = 0; w < kThreads / 32; ++w) n += s.n_of_warp[w];
    __syncthreads();
  }
  if (threadIdx.x == 0) a.counts[rank] = n;
}

__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ PackParcelsArgs a) {
  const ChooseRanksArgs& chosen = a.chosen;
  const int64_t token = blockIdx.x;
  const int rank = blockIdx.y, slot = chosen.slots[token * chosen.n_ranks + rank];
  if (slot < 0) return;
  const int64_t place = a.out ? first_of(chosen.counts, 0, rank) + slot : slot;
  std::byte* const to =
      (a.out ? a.out : a.peers.of_rank[rank] + a.offset) + place * a.shape.bytes();
  write_row(a.shape.format, a.x.data + token * a.x.stride, a.shape.dim, to);
  const int32_t* const ids = chosen.ids + token * chosen.ids_stride;
  const uint32_t hash = hash_of_choice(ids, chosen.n_active);
  auto* const ids_out = reinterpret_cast<int32_t*>(to + a.shape.row_bytes());
  auto* const weights_out = reinterpret_cast<float*>(ids_out + chosen.n_active);
  for (int k = threadIdx.x; k < chosen.n_active; k += kThreads) {
    const bool here = rank_of(chosen, ids, hash, k) == rank;
    ids_out[k] = here ? ids[k] : -1;
    weights_out[k] = here ? a.weights.data[token * a.weights.stride + k] : 0;
  }
}

__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const __grid_constant__ UnpackParcelsArgs a) {
  const int64_t row = blockIdx.x;
  const int dim = a.shape.dim, n_active = a.shape.n_active;
  int32_t* const ids_out = a.ids + row * n_active;
  if (a.n_each > 0 && row % a.n_each >= a.counts[row / a.n_each]) {
    for (int k = threadIdx.x; k < n_active; k += kThreads) ids_out[k] = -1;
    return;
  }
  const std::byte* const from = a.parcels + row * a.shape.bytes();
  float* const x = a.x + row * dim;
  for (int c = threadIdx.x; c < dim; c += kThreads)
    x[c] = column_of_row(a.shape.format, from, dim, c);
  const auto* const ids = reinterpret_cast<const int32_t*>(from + a.shape.row_bytes());
  const auto* const weights = reinterpret_cast<const float*>(ids + n_active);
  for (int k = threadIdx.x; k < n_active; k += kThreads) {
    ids_out[k] = ids[k];
    a.weights[row * n_active + k] = weights[k];
  }
}

__global__ void __launch_bounds__(kThreads) send_kernel(const __grid_constant__ SendSumsArgs a) {
  const int64_t row = blockIdx.x, row_bytes = encoded_bytes(a.format, a.dim);
  const float* const from = a.sums.data + row * a.sums.stride;
  if (a.out) return write_row(a.format, from, a.dim, a.out + row * row_bytes);
  const int64_t source = row / a.n_each, slot = row % a.n_each;
  if (slot >= a.counts[source]) return;
  write_row(a.format, from, a.dim, a.peers.of_rank[source] + a.offset + slot * row_bytes);
}

// One block for each token.
__global__ void __launch_bounds__(kThreads) add_kernel(const __grid_constant__ AddSumsArgs a) {
  const int64_t token = blockIdx.x;
  const int32_t* const slots = a.slots + token * a.n_ranks;
  float* const y = a.y.data + token * a.y.stride;
  const int64_t row_bytes = encoded_bytes(a.format, a.dim);
  for (int c = threadIdx.x; c < a.dim; c += kThreads) {
    float sum = 0;
    int first = 0;
    for (int r = 0; r < a.n_ranks; ++r) {
      if (a.n_each > 0) first = r * a.n_each;
      if (slots[r] >= 0)
        sum += column_of_row(a.format, a.sums + (first + slots[r]) * row_bytes, a.dim, c);
      if (a.n_each == 0) first += a.counts[r];
    }
    y[c] += sum;
  }
}

// One thread for each rank. What kernels before have written is visible to who sees the word.
__global__ void __launch_bounds__(kMaxPeers)
    signal_kernel(const __grid_constant__ SignalPeersArgs a) {
  const int rank = threadIdx.x;
  const uint32_t n = *a.n_raised + 1;
  std::byte* const window = a.peers.of_rank[rank];
  if (a.counts) *reinterpret_cast<int32_t*>(window + a.count) = a.counts[rank];
  store_release(reinterpret_cast<uint32_t*>(window + a.word), n);
  __syncthreads();
  if (rank == 0) *a.n_raised = n;
}

__global__ void __launch_bounds__(kMaxPeers)
    await_kernel(const __grid_constant__ AwaitPeersArgs a) {
  const uint32_t n = *a.n_awaited + 1;
  while (static_cast<int32_t>(load_acquire(a.words + threadIdx.x) - n) < 0) {
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  *a.n_awaited = n;
  *a.passed = n;
}

}  // namespace

void choose_ranks(const Stream& stream, const ChooseRanksArgs& a) {
  launch(choose_kernel, {.grid_x = a.n_ranks, .threads = kThreads, .shared_bytes = sizeof(Shared)},
         stream, a);
}

void pack_parcels(const Stream& stream, const PackParcelsArgs& a) {
  if (a.chosen.tokens > 0)
    launch(pack_kernel,
           {.grid_x = a.chosen.tokens, .grid_y = a.chosen.n_ranks, .threads = kThreads}, stream, a);
}

void unpack_parcels(const Stream& stream, const UnpackParcelsArgs& a) {
  if (a.rows > 0) launch(unpack_kernel, {.grid_x = a.rows, .threads = kThreads}, stream, a);
}

void send_sums(const Stream& stream, const SendSumsArgs& a) {
  if (a.rows > 0) launch(send_kernel, {.grid_x = a.rows, .threads = kThreads}, stream, a);
}

void add_sums(const Stream& stream, const AddSumsArgs& a) {
  if (a.tokens > 0) launch(add_kernel, {.grid_x = a.tokens, .threads = kThreads}, stream, a);
}

void signal_peers(const Stream& stream, const SignalPeersArgs& a) {
  launch(signal_kernel, {.threads = a.n_ranks}, stream, a);
}

void await_peers(const Stream& stream, const AwaitPeersArgs& a) {
  launch(await_kernel, {.threads = a.n_ranks}, stream, a);
}

}  // namespace tandem::gpu
