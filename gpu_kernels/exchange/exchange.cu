// One block per packed row; one thread per expert of a token.
#include "device.h"
#include "gpu_kernels/exchange/exchange.h"
#include "gpu_kernels/exchange/row_words.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ PackRowsArgs a) {
  const int64_t row = blockIdx.x;
  std::byte* const out = a.out + row * a.shape.bytes();
  auto* const ids = reinterpret_cast<int32_t*>(out + a.shape.row_bytes());
  auto* const weights = reinterpret_cast<float*>(ids + a.shape.n_active);
  const bool is_token = row < a.tokens;
  if (is_token) write_row(a.shape.format, a.x.data + row * a.x.stride, a.shape.dim, out);
  for (int i = threadIdx.x; i < a.shape.n_active; i += kThreads) {
    ids[i] = is_token ? a.ids[row * a.ids_stride + i] : -1;
    weights[i] = is_token ? a.weights.data[row * a.weights.stride + i] : 0;
  }
}

__global__ void __launch_bounds__(kThreads) own_ids_kernel(const __grid_constant__ OwnIdsArgs a) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= int64_t{a.tokens} * a.n_active) return;
  const int64_t token = i / a.n_active;
  const int32_t* const ids = a.ids + token * a.ids_stride;
  const int32_t id = ids[i - token * a.n_active];
  a.out[i] = id;
  if (id < 0) return;
  const int32_t* const owners = a.owners + int64_t{id} * a.max_owners;
  int n = 0;
  while (n < a.max_owners && owners[n] >= 0) ++n;
  if (n < 2) return;
  const int source = a.tokens_of_source > 0 ? static_cast<int>(token / a.tokens_of_source) : -1;
  const uint32_t hash = hash_of_choice(ids, a.n_active);
  if (nearest_replica(owners, n, source, a.hosts, hash, id) != a.rank) a.out[i] = -1;
}

}  // namespace

void own_ids(const Stream& stream, const OwnIdsArgs& a) {
  const int64_t n = int64_t{a.tokens} * a.n_active;
  if (n > 0)
    launch(own_ids_kernel,
           {.grid_x = static_cast<int>((n + kThreads - 1) / kThreads), .threads = kThreads}, stream,
           a);
}

void pack_rows(const Stream& stream, const PackRowsArgs& a) {
  if (a.rows > 0) launch(pack_kernel, {.grid_x = a.rows, .threads = kThreads}, stream, a);
}

}  // namespace tandem::gpu
