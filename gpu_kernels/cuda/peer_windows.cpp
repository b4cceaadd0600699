// Implements peer_windows.h with CUDA's handles between processes. The processes see one GPU each;
// since CUDA 10.1 they reach memory of those that they do not see.
#include "gpu_kernels/exchange/peer_windows.h"

#include <cstring>

#include "core/rounding.h"
#include "gpu_kernels/cuda/status.h"

namespace tandem::gpu {
namespace {

// CUDA shares whole pieces of this size, so a smaller buffer would be shared with its neighbours.
constexpr int64_t kSharedPiece = 2 << 20;

}  // namespace

struct PeerWindows::Impl {
  Buffer mine;
  int rank = -1, n_ranks = 0;
  PeerAddresses all = {};
};

PeerWindows::PeerWindows(int64_t bytes)
    : impl_(new Impl{.mine = {round_up(bytes, kSharedPiece), Site::kDevice}}) {}

PeerWindows::~PeerWindows() { close(); }

void PeerWindows::close() {
  for (int r = 0; r < impl_->n_ranks; ++r)
    if (r != impl_->rank && impl_->all.of_rank[r]) cudaIpcCloseMemHandle(impl_->all.of_rank[r]);
  impl_->all = {};
}

PeerWindows::Handle PeerWindows::handle() const {
  cudaIpcMemHandle_t ipc;
  const cudaError_t status = cudaIpcGetMemHandle(&ipc, impl_->mine.as<void>());
  cudaGetLastError();  // a call that is refused is reported once
  require(status == cudaSuccess, "the GPU's memory cannot be shared: {}",
          cudaGetErrorString(status));
  Handle handle = {};
  static_assert(sizeof ipc <= sizeof handle);
  std::memcpy(handle.data(), &ipc, sizeof ipc);
  return handle;
}

void PeerWindows::open(std::span<const Handle> of_ranks, int rank) {
  check(of_ranks.size() <= kMaxPeers, "windows of so many GPUs");
  impl_->rank = rank;
  impl_->n_ranks = static_cast<int>(of_ranks.size());
  for (int r = 0; r < impl_->n_ranks; ++r) {
    if (r == rank) {
      impl_->all.of_rank[r] = impl_->mine.as<std::byte>();
      continue;
    }
    cudaIpcMemHandle_t ipc;
    std::memcpy(&ipc, of_ranks[r].data(), sizeof ipc);
    void* memory = nullptr;
    const cudaError_t status = cudaIpcOpenMemHandle(&memory, ipc, cudaIpcMemLazyEnablePeerAccess);
    cudaGetLastError();
    require(status == cudaSuccess, "the GPU cannot reach that of rank {}: {}", r,
            cudaGetErrorString(status));
    impl_->all.of_rank[r] = static_cast<std::byte*>(memory);
  }
}

const PeerAddresses& PeerWindows::addresses() const { return impl_->all; }
std::byte* PeerWindows::own() const { return impl_->mine.as<std::byte>(); }

}  // namespace tandem::gpu
