// All rows go to all ranks, and their sums are reduced and scattered. All ranks send as many rows
// as the one with the most, so that the pieces are equal. Floats are computed where they have come,
// other rows are decoded before. Sums travel as floats.
#include <array>

#include "gpu_kernels/exchange/parcels.h"
#include "offload/gpu/exchange/cuda_exchange.h"
#include "ops/cuda_weights.h"

namespace tandem {
namespace {

gpu::ParcelShape shape_of(const ModelConfig& config, RowFormats formats) {
  return {static_cast<int>(config.dim), config.router.n_active, formats.there};
}

class CudaGather final : public CudaExchange {
 public:
  CudaGather(const Parts& parts, int64_t max_rows)
      : CudaExchange(max_rows),
        p_(parts),
        dim_(parts.config.dim),
        n_active_(parts.config.router.n_active),
        n_ranks_(parts.ranks.n_ranks()),
        shape_(shape_of(parts.config, parts.formats)),
        rows_(n_ranks_ * max_rows * shape_.bytes(), gpu::Site::kDevice),
        sums_(n_ranks_ * max_rows * dim_ * 4, gpu::Site::kDevice),
        ids_(n_ranks_ * max_rows * n_active_ * 4, gpu::Site::kDevice),
        x_(decodes() ? n_ranks_ * max_rows * dim_ * 4 : 0, gpu::Site::kDevice),
        all_ids_(decodes() ? ids_.bytes() : 0, gpu::Site::kDevice),
        weights_(decodes() ? ids_.bytes() : 0, gpu::Site::kDevice) {}

  void send(const CudaLane& lane, const ExpertBatch& own) override {
    like_[lane.number] = own;
    const TensorView& ids = own.routing.ids;
    gpu::pack_rows(p_.stream,
                   {.x = gpu_matrix(own.x),
                    .ids = static_cast<const int32_t*>(ids.data),
                    .ids_stride = ids.stride,
                    .weights = gpu_matrix(own.routing.weights),
                    .shape = shape_,
                    .out = parcels_of(lane) + p_.ranks.rank() * lane.n_of_rank * shape_.bytes(),
                    .tokens = static_cast<int>(own.x.rows),
                    .rows = static_cast<int>(lane.n_of_rank)});
    p_.stream.record(ready_);
    p_.network.wait_for(ready_);
    p_.ranks.all_gather(p_.network, parcels_of(lane), lane.n_of_rank * shape_.bytes() / 4);
    p_.network.record(there_[lane.number]);
  }

  Here arrived(const CudaLane& lane) override {
    p_.stream.wait_for(there_[lane.number]);
    ExpertBatch batch = decodes() ? decoded(lane) : in_place(lane);
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
  bool decodes() const { return shape_.format != RowFormat::kF32; }
  std::byte* parcels_of(const CudaLane& lane) const {
    return rows_.as<std::byte>() + lane.first * n_ranks_ * shape_.bytes();
  }
  // The rows of all ranks where they have come.
  ExpertBatch in_place(const CudaLane& lane) const {
    auto* const packed = reinterpret_cast<float*>(parcels_of(lane));
    const int64_t n = lane.n_of_rank * n_ranks_, stride = shape_.bytes() / 4;
    ExpertBatch batch = like_[lane.number];
    batch.first_row = 0;
    batch.x = {packed, n, dim_, stride};
    batch.routing.ids = {packed + dim_, n, n_active_, stride, DType::kI32};
    batch.routing.weights = {packed + dim_ + n_active_, n, n_active_, stride};
    return batch;
  }
  ExpertBatch decoded(const CudaLane& lane) const {
    const int64_t n = lane.n_of_rank * n_ranks_, first = lane.first * n_ranks_;
    float* const x = x_.as<float>() + first * dim_;
    int32_t* const ids = all_ids_.as<int32_t>() + first * n_active_;
    float* const weights = weights_.as<float>() + first * n_active_;
    gpu::unpack_parcels(p_.stream, {.parcels = parcels_of(lane),
                                    .rows = static_cast<int>(n),
                                    .shape = shape_,
                                    .x = x,
                                    .ids = ids,
                                    .weights = weights});
    ExpertBatch batch = like_[lane.number];
    batch.first_row = 0;
    batch.x = {x, n, dim_, dim_};
    batch.routing.ids = {ids, n, n_active_, n_active_, DType::kI32};
    batch.routing.weights = {weights, n, n_active_, n_active_};
    return batch;
  }
  TensorView sums_of(const CudaLane& lane) const {
    return {sums_.as<float>() + lane.first * n_ranks_ * dim_, lane.n_of_rank * n_ranks_, dim_,
            dim_};
  }

  const Parts p_;
  const int64_t dim_;
  const int n_active_, n_ranks_;
  const gpu::ParcelShape shape_;
  const gpu::Buffer rows_;  // [ranks * max_rows] parcels
  const gpu::Buffer sums_;  // [ranks * max_rows, dim]
  const gpu::Buffer ids_;   // [ranks * max_rows, n_active] where several ranks have an expert
  // [ranks * max_rows, dim] or [ranks * max_rows, n_active], where rows are decoded.
  const gpu::Buffer x_, all_ids_, weights_;
  gpu::Event ready_;                                       // what is sent next
  std::array<gpu::Event, ExpertPool::kMaxTickets> there_;  // rows have come, or sums have
  std::array<ExpertBatch, ExpertPool::kMaxTickets> like_ = {};
};

}  // namespace

int64_t cuda_gather_bytes(const ModelConfig& config, int n_ranks, int64_t max_rows,
                          RowFormats formats) {
  const gpu::ParcelShape shape = shape_of(config, formats);
  const int n_active = config.router.n_active;
  const int64_t decoded = shape.format == RowFormat::kF32 ? 0 : 4 * (config.dim + 2 * n_active);
  return n_ranks * max_rows * (shape.bytes() + 4 * (config.dim + n_active) + decoded);
}

std::unique_ptr<CudaExchange> make_cuda_gather(const CudaExchange::Parts& parts, int64_t max_rows) {
  return std::make_unique<CudaGather>(parts, max_rows);
}

}  // namespace tandem
