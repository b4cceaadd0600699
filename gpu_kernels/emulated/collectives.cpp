// Implements collectives.h between emulated GPUs, of threads or processes, in POSIX shared memory.
// Calls are work of the stream, as NCCL's are: a missing wait is a real race, and a rank that does
// not come keeps the others' streams waiting.
#include "gpu_kernels/collectives.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>

#include "core/check.h"
#include "core/yield_core.h"
#include "gpu_kernels/emulated/device_memory.h"
#include "gpu_kernels/emulated/emulator.h"
#include "gpu_kernels/emulated/loss.h"

namespace tandem::gpu {
namespace {

constexpr int kMaxRanks = 32;
constexpr int64_t kPiece = 1 << 13;  // floats

// Numbers go piece by piece. Two of each rank's pieces are kept, because a rank that is ahead
// writes the next one while others still read.
struct Shared {
  std::atomic<int> n_here;
  struct alignas(64) Rank {
    std::atomic<uint64_t> n_written;  // pieces
    int64_t n_of_call[2];             // numbers of the calls that its two pieces belong to
  } ranks[kMaxRanks];
  float pieces[2][kMaxRanks][kPiece];
};

}  // namespace

struct Collectives::Impl {
  int rank, n_ranks;
  Shared* shared = nullptr;
  std::atomic<uint64_t> n_done = 0;  // pieces
  std::atomic<bool> ending = false;

  bool may_wait() const { return !ending && !emulated::is_lost(); }

  // What follows runs on the stream's thread. The sums of pieces are taken in ascending order of
  // ranks.
  void all_reduce(float* x, int64_t n) {
    for (int64_t first = 0; first < n && may_wait(); first += kPiece)
      exchange(x + first, std::min(kPiece, n - first), n,
               [&](const auto& pieces, int64_t size) { add(pieces, size, x + first); });
  }

  // Each rank sends its own part of `all`, which are bits of any numbers.
  void all_gather(float* all, int64_t n) {
    for (int64_t first = 0; first < n && may_wait(); first += kPiece)
      exchange(all + rank * n + first, std::min(kPiece, n - first), n,
               [&](const auto& pieces, int64_t size) {
                 for (int r = 0; r < n_ranks; ++r)
                   std::memcpy(all + r * n + first, pieces[r], size * sizeof(float));
               });
  }

  void reduce_scatter(float* all, int64_t n) {
    for (int r = 0; r < n_ranks; ++r)
      for (int64_t first = 0; first < n && may_wait(); first += kPiece)
        exchange(all + r * n + first, std::min(kPiece, n - first), n,
                 [&](const auto& pieces, int64_t size) {
                   if (r == rank) add(pieces, size, all + r * n + first);
                 });
  }

  void broadcast(float* x, int64_t n, int root) {
    for (int64_t first = 0; first < n && may_wait(); first += kPiece)
      exchange(x + first, std::min(kPiece, n - first), n, [&](const auto& pieces, int64_t size) {
        std::copy_n(pieces[root], size, x + first);
      });
  }

  void add(const float (&pieces)[kMaxRanks][kPiece], int64_t n, float* out) const {
    std::copy_n(pieces[0], n, out);
    for (int r = 1; r < n_ranks; ++r)
      for (int64_t i = 0; i < n; ++i) out[i] += pieces[r][i];
  }

  // Sends a piece of this rank, and calls use(pieces of all ranks, n).
  template <class Use>
  void exchange(const float* mine, int64_t n, int64_t n_of_call, Use use) {
    const uint64_t piece = n_done;
    auto& pieces = shared->pieces[piece % 2];
    std::memcpy(pieces[rank], mine, n * sizeof(float));
    shared->ranks[rank].n_of_call[piece % 2] = n_of_call;
    shared->ranks[rank].n_written.store(piece + 1, std::memory_order_release);
    for (int r = 0; r < n_ranks; ++r) {
      while (shared->ranks[r].n_written.load(std::memory_order_acquire) <= piece) {
        if (!may_wait()) return;
        yield_core();
      }
      check(shared->ranks[r].n_of_call[piece % 2] == n_of_call, "ranks make the same calls");
    }
    use(pieces, n);
    n_done = piece + 1;
  }
};

Collectives::Id Collectives::make_id() {
  static std::atomic<int> n = 0;
  Id id = {};
  std::snprintf(id.data(), id.size(), "/tandem-collectives-%d-%d", getpid(), n++);
  const int file = shm_open(id.data(), O_CREAT | O_EXCL | O_RDWR, 0600);
  require(file >= 0 && ftruncate(file, sizeof(Shared)) == 0,
          "emulated GPUs need {} bytes of shared memory in /dev/shm", sizeof(Shared));
  close(file);
  return id;
}

Collectives::Collectives(const Id& id, int rank, int n_ranks)
    : impl_(new Impl{.rank = rank, .n_ranks = n_ranks}) {
  require(n_ranks <= kMaxRanks, "{} emulated GPUs: at most {}", n_ranks, kMaxRanks);
  const int file = shm_open(id.data(), O_RDWR, 0600);
  require(file >= 0, "emulated GPUs of different hosts cannot compute together");
  void* const memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  require(memory != MAP_FAILED, "no address space is left for emulated GPUs");
  impl_->shared = static_cast<Shared*>(memory);
  ++impl_->shared->n_here;
  while (impl_->shared->n_here < n_ranks) yield_core();
  shm_unlink(id.data());  // all have opened it; the memory is freed when the last of them ends
}

Collectives::~Collectives() {
  impl_->ending = true;
  munmap(impl_->shared, sizeof(Shared));
}

int Collectives::rank() const { return impl_->rank; }
int Collectives::n_ranks() const { return impl_->n_ranks; }

void Collectives::all_reduce(Stream& stream, float* x, int64_t n) {
  const emulated::InDriver driver;
  check(emulated::is_allocated(x, n * int64_t{sizeof(float)}), "the GPUs add GPU memory");
  emulated::enqueue(stream, [impl = impl_.get(), x, n] { impl->all_reduce(x, n); });
}

void Collectives::broadcast(Stream& stream, float* x, int64_t n, int root) {
  const emulated::InDriver driver;
  check(emulated::is_allocated(x, n * int64_t{sizeof(float)}), "the GPUs send GPU memory");
  emulated::enqueue(stream, [impl = impl_.get(), x, n, root] { impl->broadcast(x, n, root); });
}

void Collectives::all_gather(Stream& stream, void* all, int64_t n) {
  const emulated::InDriver driver;
  auto* const numbers = static_cast<float*>(all);
  check(emulated::is_allocated(numbers, impl_->n_ranks * n * int64_t{sizeof(float)}),
        "the GPUs gather GPU memory");
  emulated::enqueue(stream, [impl = impl_.get(), numbers, n] { impl->all_gather(numbers, n); });
}

void Collectives::reduce_scatter(Stream& stream, float* all, int64_t n) {
  const emulated::InDriver driver;
  check(emulated::is_allocated(all, impl_->n_ranks * n * int64_t{sizeof(float)}),
        "the GPUs add GPU memory");
  emulated::enqueue(stream, [impl = impl_.get(), all, n] { impl->reduce_scatter(all, n); });
}

uint64_t Collectives::progress() const { return impl_->n_done; }

}  // namespace tandem::gpu
