// What exchanges have in common in which a row goes only to the ranks that have one of its experts
// (gpu_kernels/exchange/parcels.h).
#pragma once
#include <array>

#include "gpu_kernels/exchange/parcels.h"
#include "offload/gpu/exchange/cuda_exchange.h"

namespace tandem {

class CudaParcels {
 public:
  // For max_rows rows of each rank in the micro-batches of a step.
  CudaParcels(const CudaExchange::Parts& parts, int64_t max_rows);
  static int64_t bytes_for(const ModelConfig& config, int n_ranks, int64_t max_rows);

  const gpu::ParcelShape& shape() const { return shape_; }
  // Decides where the tokens of a micro-batch go and writes the parcels: `to` has its out, or its
  // peers and offset. The counts are written to `counts`, in GPU memory, which keeps them until
  // add_to().
  void pack(const CudaLane& lane, const ExpertBatch& own, int32_t* counts,
            const gpu::PackParcelsArgs& to);
  // Rows of n parcels that have come, as CudaExchange::arrived() returns them. `from` has parcels,
  // and counts where n_each > 0.
  CudaExchange::Here unpack(const CudaLane& lane, int64_t n, const gpu::UnpackParcelsArgs& from);
  TensorView sums(const CudaLane& lane) const { return sums_of_[lane.number]; }
  // y += the answers of its tokens, [.., answer_bytes()] in the places of the parcels.
  void add_to(const CudaLane& lane, const std::byte* answers, int n_each, TensorView y);
  int64_t answer_bytes() const { return encoded_bytes(p_.formats.back, shape_.dim); }

 private:
  const CudaExchange::Parts p_;
  const gpu::ParcelShape shape_;
  const int n_ranks_;
  const gpu::Buffer slots_;          // [max_rows, ranks]
  const gpu::Buffer x_, sums_;       // [ranks * max_rows, dim]
  const gpu::Buffer ids_, weights_;  // [ranks * max_rows, n_active]
  std::array<const int32_t*, ExpertPool::kMaxTickets> counts_ = {};
  std::array<ExpertBatch, ExpertPool::kMaxTickets> like_ = {};
  std::array<TensorView, ExpertPool::kMaxTickets> sums_of_ = {};
};

}  // namespace tandem
