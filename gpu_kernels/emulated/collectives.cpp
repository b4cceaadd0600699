// Implements collectives.h between emulated GPUs, of threads or processes, in POSIX shared memory.
// Calls are work of the stream, as NCCL's are: a missing wait is a real race, and a rank that does
// not come keeps the others' streams waiting.
#include "gpu_kernels/exchange/collectives.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <vector>

#include "core/check.h"
#include "core/yield_core.h"
#include "gpu_kernels/emulated/device_memory.h"
#include "gpu_kernels/emulated/emulator.h"
#include "gpu_kernels/emulated/loss.h"

namespace tandem::gpu {
namespace {

constexpr int kMaxRanks = 32;
constexpr int64_t kPiece = 1 << 13;  // floats
constexpr int64_t kAnyNumber = -1;

// Numbers go piece by piece. Two of each rank's pieces are kept, because a rank that is ahead
// writes the next one while others still read.
struct Shared {
  std::atomic<int> n_here;
  // What a rank says of a piece.
  struct Said {
    int64_t n_of_call;  // numbers of the call that it belongs to; kAnyNumber: they differ
    int64_t n;          // numbers in it
    int to;             // the rank that it is for; -1: all
    bool more;          // another piece of the call follows
  };
  struct alignas(64) Rank {
    std::atomic<uint64_t> n_written;  // pieces
    Said said[2];                     // of its two pieces
  } ranks[kMaxRanks];
  float pieces[2][kMaxRanks][kPiece];
};

}  // namespace

struct Collectives::Impl {
  int rank, n_ranks;
  Shared* shared = nullptr;
  std::atomic<uint64_t> n_done = 0;  // pieces
  std::atomic<bool> ending = false;

  static void count_sent(int64_t n) { emulated::counts().sent += n * int64_t{sizeof(float)}; }
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
    count_sent((n_ranks - 1) * n);
    for (int64_t first = 0; first < n && may_wait(); first += kPiece)
      exchange(all + rank * n + first, std::min(kPiece, n - first), n,
               [&](const auto& pieces, int64_t size) {
                 for (int r = 0; r < n_ranks; ++r)
                   std::memcpy(all + r * n + first, pieces[r], size * sizeof(float));
               });
  }

  void reduce_scatter(float* all, int64_t n) {
    count_sent((n_ranks - 1) * n);
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

  // What a rank has for all ranks goes in pieces of one rank each, in as many turns as the rank
  // with the most pieces needs.
  struct Numbers {
    const float* sent;
    std::vector<int64_t> n_sent;
    float* received;
    std::vector<int64_t> n_received;
  };
  void all_to_all(const Numbers& numbers) {
    count_sent(std::accumulate(numbers.n_sent.begin(), numbers.n_sent.end(), int64_t{0}) -
               numbers.n_sent[rank]);
    std::vector<float*> into(n_ranks, numbers.received);
    for (int r = 1; r < n_ranks; ++r) into[r] = into[r - 1] + numbers.n_received[r - 1];
    std::vector<int64_t> left = numbers.n_received;
    const float* from = numbers.sent;
    int to = 0;
    int64_t n_gone = 0;  // of those for `to`
    const auto skip_empty = [&] {
      while (to < n_ranks && n_gone == numbers.n_sent[to]) {
        ++to;
        n_gone = 0;
      }
    };
    skip_empty();
    for (bool more = true; more && may_wait();) {
      Shared::Said said = {.n_of_call = kAnyNumber, .n = 0, .to = to, .more = false};
      const float* const piece = from;
      if (to < n_ranks) {
        said.n = std::min(kPiece, numbers.n_sent[to] - n_gone);
        from += said.n;
        n_gone += said.n;
        skip_empty();
        said.more = to < n_ranks;
      }
      more = false;
      exchange(piece, said, [&](const auto& pieces, int64_t) {
        for (int r = 0; r < n_ranks; ++r) {
          const Shared::Said& theirs = shared->ranks[r].said[n_done % 2];
          more |= theirs.more;
          if (theirs.to != rank) continue;
          check(theirs.n <= left[r], "a rank sends as many numbers as are expected");
          std::copy_n(pieces[r], theirs.n, into[r]);
          into[r] += theirs.n;
          left[r] -= theirs.n;
        }
      });
    }
    if (!may_wait()) return;
    for (const int64_t n : left) check(n == 0, "a rank sends as many numbers as are expected");
  }

  template <class Use>
  void exchange(const float* mine, int64_t n, int64_t n_of_call, Use use) {
    exchange(mine, {.n_of_call = n_of_call, .n = n, .to = -1, .more = false}, use);
  }
  // Sends a piece of this rank, and calls use(pieces of all ranks, n).
  template <class Use>
  void exchange(const float* mine, const Shared::Said& said, Use use) {
    const int64_t n = said.n, n_of_call = said.n_of_call;
    const uint64_t piece = n_done;
    auto& pieces = shared->pieces[piece % 2];
    if (n > 0) std::memcpy(pieces[rank], mine, n * sizeof(float));
    shared->ranks[rank].said[piece % 2] = said;
    shared->ranks[rank].n_written.store(piece + 1, std::memory_order_release);
    for (int r = 0; r < n_ranks; ++r) {
      while (shared->ranks[r].n_written.load(std::memory_order_acquire) <= piece) {
        if (!may_wait()) return;
        yield_core();
      }
      check(shared->ranks[r].said[piece % 2].n_of_call == n_of_call, "ranks make the same calls");
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

void Collectives::all_to_all(Stream& stream, const Parcels& p) {
  const emulated::InDriver driver;
  const Impl::Numbers numbers = {.sent = static_cast<const float*>(p.sent),
                                 .n_sent = {p.n_sent.begin(), p.n_sent.end()},
                                 .received = static_cast<float*>(p.received),
                                 .n_received = {p.n_received.begin(), p.n_received.end()}};
  const auto bytes_of = [](const std::vector<int64_t>& n) {
    return std::accumulate(n.begin(), n.end(), int64_t{0}) * int64_t{sizeof(float)};
  };
  check(emulated::is_allocated(numbers.sent, bytes_of(numbers.n_sent)) &&
            emulated::is_allocated(numbers.received, bytes_of(numbers.n_received)),
        "the GPUs send GPU memory");
  emulated::enqueue(stream, [impl = impl_.get(), numbers] { impl->all_to_all(numbers); });
}

uint64_t Collectives::progress() const { return impl_->n_done; }

}  // namespace tandem::gpu
