// MPI's own collective calls, of all ranks. `tandem bench comm` measures the calls of a group
// beside them; nothing computes with them, because they wait for a lost rank for ever and promise
// no order of sums.
#pragma once
#include <memory>
#include <span>
#include <string>

#include "comm/group.h"

namespace tandem {

class RawCollectives {
 public:
  virtual ~RawCollectives() = default;
  virtual std::string name() const = 0;  // of the library

  virtual void barrier() = 0;
  virtual void broadcast(Bytes x, int root) = 0;
  // The same number of bytes from each rank.
  virtual void all_gather(ConstBytes mine, Bytes out) = 0;
  virtual void all_to_all(Pieces<const std::byte> in, Pieces<std::byte> out) = 0;
  // Pieces of equal size.
  virtual void reduce_scatter(std::span<const float> in, std::span<float> out) = 0;
  virtual void all_reduce(std::span<const float> in, std::span<float> out) = 0;
};

// Those of the library that open_mpi_world() has opened under one of `names` and that has not ended
// yet. Sizes are below 2^31 bytes. Throws Error when functions are missing, and calls throw
// RunError when MPI reports an error.
std::unique_ptr<RawCollectives> open_mpi_collectives(std::span<const char* const> names);

}  // namespace tandem
