// Implements peer_windows.h between emulated GPUs, of threads or processes of one host.
#include "gpu_kernels/exchange/peer_windows.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "core/check.h"

namespace tandem::gpu {

// The file has no name: others open it through this process.
struct PeerWindows::Impl {
  int64_t bytes = 0;
  int file = -1, rank = -1;
  PeerAddresses all = {};
  std::byte* mine = nullptr;

  std::byte* map(int of) const {
    void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, of, 0);
    return at == MAP_FAILED ? nullptr : static_cast<std::byte*>(at);
  }
};

PeerWindows::PeerWindows(int64_t bytes) : impl_(new Impl{.bytes = bytes}) {
  impl_->file = memfd_create("tandem peer window", MFD_CLOEXEC);
  require(impl_->file >= 0 && ftruncate(impl_->file, bytes) == 0 &&
              (impl_->mine = impl_->map(impl_->file)),
          "emulated GPUs need {} bytes of shared memory", bytes);
  std::memset(impl_->mine, 0xff, bytes);
}

PeerWindows::~PeerWindows() {
  close();
  if (impl_->mine) munmap(impl_->mine, impl_->bytes);
  if (impl_->file >= 0) ::close(impl_->file);
}

void PeerWindows::close() {
  for (int r = 0; r < kMaxPeers; ++r)
    if (r != impl_->rank && impl_->all.of_rank[r]) munmap(impl_->all.of_rank[r], impl_->bytes);
  impl_->all = {};
}

PeerWindows::Handle PeerWindows::handle() const {
  Handle handle = {};
  std::snprintf(handle.data(), handle.size(), "/proc/%d/fd/%d", getpid(), impl_->file);
  return handle;
}

void PeerWindows::open(std::span<const Handle> of_ranks, int rank) {
  check(of_ranks.size() <= kMaxPeers, "windows of so many GPUs");
  impl_->rank = rank;
  for (int r = 0; r < static_cast<int>(of_ranks.size()); ++r) {
    if (r == rank) {
      impl_->all.of_rank[r] = impl_->mine;
      continue;
    }
    const int file = ::open(of_ranks[r].data(), O_RDWR | O_CLOEXEC);
    impl_->all.of_rank[r] = file >= 0 ? impl_->map(file) : nullptr;
    if (file >= 0) ::close(file);
    require(impl_->all.of_rank[r], "the GPU cannot reach that of rank {}", r);
  }
}

const PeerAddresses& PeerWindows::addresses() const { return impl_->all; }
std::byte* PeerWindows::own() const { return impl_->mine; }

}  // namespace tandem::gpu
