// The ranks that compute one model together, and what they can do together. A rank is a process
// (mpi_world.h), or a thread in tests (local_ranks.h); one rank alone is a group too (alone.h).
#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/run_error.h"

namespace tandem {

// A rank does not answer, or the ranks do not make the same calls. The group and all others of this
// process are of no use afterwards, and the process ends (mpi_world.h says how).
struct GroupError : RunError {
  GroupError(int lost_rank, const std::string& message) : RunError(message), lost(lost_rank) {}
  int lost;  // number in the world of the rank that does not answer; -1: unknown
};

// How long a rank waits for another one before it throws GroupError. Half a minute after a rank is
// lost all others have ended.
struct Patience {
  std::chrono::duration<double> limit{20};
  // The thread sleeps while it waits, so that others can compute on its core meanwhile.
  bool sleeps = false;
};

using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;

// A piece for each rank, or from each, one after another without gaps.
template <class T>
struct Pieces {
  std::span<T> all;
  std::span<const int64_t> sizes;  // [size()], in elements; their sum is all.size()
};

// Memory of equal size on every rank, into which the other ranks write without this rank's doing.
// All know its layout, so that no rank must be told sizes.
class Window {
 public:
  virtual ~Window() = default;
  // The memory of a rank, as this one sees it.
  virtual Bytes of(int rank) const = 0;
  // Tells `rank` a number, which it sees after everything that this rank wrote before. The numbers
  // for a rank only grow.
  virtual void signal(int rank, uint64_t number) = 0;
  // Returns when the last number that `rank` told this rank is at least `number`.
  virtual void wait(int rank, uint64_t number) = 0;
};

// All ranks of a group make the same calls in the same order, one at a time and from one thread.
// Several threads of a rank may use groups of their own at the same time, once those are split. A
// call returns when this rank's part is done. Memory is the host's. Every call throws GroupError
// when a rank does not come within the patience, or when sizes that two ranks give differ.
class Group {
 public:
  virtual ~Group() = default;
  virtual int rank() const = 0;  // in [0, size())
  virtual int size() const = 0;
  // The number in the world of a rank of this group.
  virtual int world_rank(int rank) const = 0;
  // Holds for this group and for those that are split from it later.
  virtual void set_patience(Patience patience) = 0;

  virtual void barrier() = 0;
  // x = x of rank `root`.
  virtual void broadcast(Bytes x, int root) = 0;
  // out = mine of rank 0, of rank 1, .. All ranks know all sizes. `mine` may lie at its place in
  // `out`; other overlaps are not allowed, here and below.
  virtual void all_gather(ConstBytes mine, Pieces<std::byte> out) = 0;
  // Piece r of `in` goes to rank r, piece r of `out` comes from rank r. Both know the size.
  virtual void all_to_all(Pieces<const std::byte> in, Pieces<std::byte> out) = 0;

  // Sums are taken in ascending order of ranks: every rank gets the same bits, in every run.
  //
  // out = piece rank() of the sum of `in` of all ranks; may be that piece of `in`.
  virtual void reduce_scatter(Pieces<const float> in, std::span<float> out);
  // x = sum of x of all ranks.
  virtual void all_reduce(std::span<float> x);

  // The group of the ranks that give the same color, in the order of their ranks; null for a
  // negative color. It may outlive this group.
  virtual std::unique_ptr<Group> split(int color) = 0;
  // A window of zeros, which the group outlives. Throws Error on all ranks where they do not share
  // memory.
  virtual std::unique_ptr<Window> allocate_window(int64_t bytes) = 0;

  // Returns when done() holds, which `rank` has to bring about; throws as the calls above.
  virtual void wait_for_rank(int rank, const std::function<bool()>& done) = 0;

  // The same number of bytes from each rank.
  void all_gather_equal(ConstBytes mine, Bytes out);
  // One value of each rank; out: [size()].
  template <class T>
  void all_gather_values(const T& mine, std::span<T> out) {
    all_gather_equal(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(out));
  }

 private:
  std::vector<float> parts_;  // grow to the largest call
  std::vector<int64_t> sizes_, in_sizes_, out_sizes_;
};

}  // namespace tandem
