// Memory of each GPU that the GPUs of the other ranks on the host write by plain stores, over
// NVLink or PCIe, also within a recorded graph. Two implementations are selected at link time:
// cuda/peer_windows.cpp by CUDA's handles between processes, emulated/peer_windows.cpp by memory
// that the ranks of a host share.
#pragma once
#include <array>
#include <cstddef>
#include <memory>
#include <span>

#include "gpu_kernels/runtime.h"

namespace tandem::gpu {

constexpr int kMaxPeers = 32;

// The windows of all ranks as a kernel of one of them gets them, by value.
struct PeerAddresses {
  std::byte* of_rank[kMaxPeers];
};

class PeerWindows {
 public:
  using Handle = std::array<char, 128>;
  // This rank's window, all bits set. Throws Error where memory is exhausted, or the GPU's cannot
  // be shared.
  explicit PeerWindows(int64_t bytes);
  ~PeerWindows();
  // Tells other ranks of this host where the window is, while the object lives.
  Handle handle() const;
  // Called once. of_ranks: the handles of all ranks, at most kMaxPeers, in their order; this one is
  // number `rank`. The ranks make windows of the same size. Throws Error where this GPU cannot
  // reach one of them.
  void open(std::span<const Handle> of_ranks, int rank);
  // Called by all ranks after their last use, before any of them destroys its object: a GPU's
  // memory must not be freed while others have it.
  void close();
  // Valid between open() and close(), while the objects of all ranks live.
  const PeerAddresses& addresses() const;
  std::byte* own() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem::gpu
