// What the GPUs of several ranks do together, enqueued on a stream, also within a recorded graph.
// Two implementations are selected at link time: cuda/collectives.cpp calls NCCL, which is opened
// at run time; emulated/collectives.cpp uses memory that the ranks of a host share.
#pragma once
#include <array>
#include <atomic>
#include <memory>
#include <span>

#include "gpu_kernels/runtime.h"

namespace tandem::gpu {

class Collectives {
 public:
  using Id = std::array<char, 128>;
  // Names a new group of GPUs; rank 0 calls it and gives the id to the others. Throws Error where
  // NCCL is not installed.
  static Id make_id();
  // Returns when all ranks have called it, each with a GPU of its own. Throws Error where NCCL is
  // not installed or cannot connect the GPUs.
  Collectives(const Id& id, int rank, int n_ranks);
  ~Collectives();

  int rank() const;
  int n_ranks() const;
  // x = sum of x of all ranks [n]: the same bits on every rank. Ranks make the same calls in the
  // same order, recorded or not. The stream waits until all ranks have come.
  void all_reduce(Stream& stream, float* x, int64_t n);
  // x = x of rank `root` [n].
  void broadcast(Stream& stream, float* x, int64_t n, int root);
  // Piece r of `all`, each of n 4-byte numbers, comes from rank r: its own piece is there before.
  void all_gather(Stream& stream, void* all, int64_t n);
  // Piece rank() of `all`, each of n floats, becomes the sum of that piece of all ranks. The other
  // pieces are undefined then.
  void reduce_scatter(Stream& stream, float* all, int64_t n);
  // What goes to each rank and what comes from it, so many 4-byte numbers; those of ranks, this one
  // too, follow each other in the order of ranks.
  struct Parcels {
    const void* sent;
    std::span<const int64_t> n_sent;  // [ranks]
    void* received;
    std::span<const int64_t> n_received;  // [ranks] what those ranks send here
  };
  // The host knows the numbers, so a recording repeats them.
  void all_to_all(Stream& stream, const Parcels& parcels);
  // For a watch on a thread of its own, because a stream waits for a lost rank without end: whether
  // the GPU has work that may wait, which the caller says, and a number that changes while the GPU
  // passes calls of the above.
  void begin_work() { has_work_ = true; }
  void end_work() { has_work_ = false; }
  bool has_work() const { return has_work_; }
  uint64_t progress() const;

 private:
  std::atomic<bool> has_work_ = false;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tandem::gpu
