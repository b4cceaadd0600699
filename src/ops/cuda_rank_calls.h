// The calls of a GPU with ranks of which some have none: its matrices pass through host memory, and
// the caller waits for the GPU and for the ranks.
#pragma once
#include "gpu_kernels/runtime.h"
#include "ops/rank_calls.h"

namespace tandem {

class CudaRankCalls {
 public:
  // For matrices of up to max_bytes. The stream outlives the object. Throws Error when too little
  // memory is left.
  CudaRankCalls(const RankGroups& groups, int64_t max_bytes, gpu::Stream& stream);

  // As in RankCalls, with matrices on the GPU; those of all_gather_cols() are dense too. Throws
  // GroupError when a rank is lost.
  void all_reduce(TensorView x);
  void all_gather_cols(TensorView x, std::span<const Slice> slices);
  void send(TensorView x);
  void receive(TensorView x);
  void route(const Routing& routing);  // the first rank's, where that routes

 private:
  TensorView staged(TensorView x, int64_t first_byte = 0) const;
  TensorView to_host(TensorView x, int64_t first_byte = 0);
  void from_host(TensorView x, int64_t first_byte = 0);

  RankCalls calls_;
  gpu::Buffer staged_;  // mapped
  gpu::Stream& stream_;
};

}  // namespace tandem
