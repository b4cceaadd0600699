// All rows go to all ranks, and their sums are reduced and scattered. All ranks send as many rows
// as the one with the most, so that the pieces are equal.
#include <array>

#include "gpu_kernels/exchange/exchange.h"
#include "offload/gpu/exchange/cuda_exchange.h"
#include "ops/cuda_weights.h"

namespace tandem {
namespace {

class CudaGather final : public CudaExchange {
 public:
  CudaGather(const Parts& parts, int64_t max_rows)
      : CudaExchange(max_rows),
        p_(parts),
        dim_(parts.config.dim),
        n_active_(parts.config.router.n_active),
        n_ranks_(parts.ranks.n_ranks()),
        stride_(gpu::packed_row_stride(dim_, n_active_)),
        rows_(n_ranks_ * max_rows * stride_ * 4, gpu::Site::kDevice),
        sums_(n_ranks_ * max_rows * dim_ * 4, gpu::Site::kDevice),
        ids_(n_ranks_ * max_rows * n_active_ * 4, gpu::Site::kDevice) {}

  void send(const CudaLane& lane, const ExpertBatch& own) override {
    like_[lane.number] = own;
    float* const packed = packed_of(lane);
    const TensorView& ids = own.routing.ids;
    gpu::pack_rows(p_.stream,
                   {.x = gpu_matrix(own.x),
                    .ids = static_cast<const int32_t*>(ids.data),
                    .ids_stride = ids.stride,
                    .weights = gpu_matrix(own.routing.weights),
                    .out = {packed + p_.ranks.rank() * lane.n_of_rank * stride_, stride_},
                    .tokens = static_cast<int>(own.x.rows),
                    .rows = static_cast<int>(lane.n_of_rank),
                    .dim = static_cast<int>(dim_),
                    .n_active = n_active_});
    p_.stream.record(ready_);
    p_.network.wait_for(ready_);
    p_.ranks.all_gather(p_.network, packed, lane.n_of_rank * stride_);
    p_.network.record(there_[lane.number]);
  }

  Here arrived(const CudaLane& lane) override {
    p_.stream.wait_for(there_[lane.number]);
    float* const packed = packed_of(lane);
    const int64_t n = lane.n_of_rank * n_ranks_;
    ExpertBatch batch = like_[lane.number];
    batch.first_row = 0;
    batch.x = {packed, n, dim_, stride_};
    batch.routing.ids = {packed + dim_, n, n_active_, stride_, DType::kI32};
    batch.routing.weights = {packed + dim_ + n_active_, n, n_active_, stride_};
    if (p_.owners.has_replicas(batch.layer))
      batch.routing.ids = p_.owners.own_ids(batch.layer, batch.routing.ids, lane.n_of_rank,
                                            ids_.as<int32_t>() + lane.first * n_ranks_ * n_active_);
    const TensorView all = sums_of(lane);
    gpu::clear(p_.stream,
               {gpu_matrix(all), {}, static_cast<int>(all.rows), static_cast<int>(all.cols)});
    return {batch, all};
  }

  void send_back(const CudaLane& lane) override {
    p_.stream.record(ready_);
    p_.network.wait_for(ready_);
    p_.ranks.reduce_scatter(p_.network, sums_of(lane).row<float>(0), lane.n_of_rank * dim_);
    p_.network.record(there_[lane.number]);
  }

  void add_to(const CudaLane& lane, TensorView y) override {
    p_.stream.wait_for(there_[lane.number]);
    const TensorView own = sums_of(lane).rows_from(p_.ranks.rank() * lane.n_of_rank, y.rows);
    gpu::add(p_.stream,
             {gpu_matrix(y), gpu_matrix(own), static_cast<int>(y.rows), static_cast<int>(y.cols)});
  }

 private:
  float* packed_of(const CudaLane& lane) const {
    return rows_.as<float>() + lane.first * n_ranks_ * stride_;
  }
  TensorView sums_of(const CudaLane& lane) const {
    return {sums_.as<float>() + lane.first * n_ranks_ * dim_, lane.n_of_rank * n_ranks_, dim_,
            dim_};
  }

  const Parts p_;
  const int64_t dim_;
  const int n_active_, n_ranks_;
  const int64_t stride_;    // floats of a packed row
  const gpu::Buffer rows_;  // [ranks * max_rows, stride_]
  const gpu::Buffer sums_;  // [ranks * max_rows, dim]
  const gpu::Buffer ids_;   // [ranks * max_rows, n_active] where several ranks have an expert
  gpu::Event ready_;        // what is sent next
  std::array<gpu::Event, ExpertPool::kMaxTickets> there_;  // rows have come, or sums have
  std::array<ExpertBatch, ExpertPool::kMaxTickets> like_ = {};
};

}  // namespace

int64_t cuda_gather_bytes(const ModelConfig& config, int n_ranks, int64_t max_rows) {
  const int n_active = config.router.n_active;
  return n_ranks * max_rows * 4 *
         (gpu::packed_row_stride(config.dim, n_active) + config.dim + n_active);
}

std::unique_ptr<CudaExchange> make_cuda_gather(const CudaExchange::Parts& parts, int64_t max_rows) {
  return std::make_unique<CudaGather>(parts, max_rows);
}

}  // namespace tandem
