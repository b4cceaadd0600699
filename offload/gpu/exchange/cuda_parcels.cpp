#include "offload/gpu/exchange/cuda_parcels.h"

#include "ops/cuda_weights.h"

namespace tandem {

CudaParcels::CudaParcels(const CudaExchange::Parts& parts, int64_t max_rows)
    : p_(parts),
      shape_{static_cast<int>(parts.config.dim), parts.config.router.n_active, parts.formats.there},
      n_ranks_(parts.ranks.n_ranks()),
      slots_(max_rows * n_ranks_ * 4, gpu::Site::kDevice),
      x_(n_ranks_ * max_rows * shape_.dim * 4, gpu::Site::kDevice),
      sums_(n_ranks_ * max_rows * shape_.dim * 4, gpu::Site::kDevice),
      ids_(n_ranks_ * max_rows * shape_.n_active * 4, gpu::Site::kDevice),
      weights_(n_ranks_ * max_rows * shape_.n_active * 4, gpu::Site::kDevice) {}

int64_t CudaParcels::bytes_for(const ModelConfig& config, int n_ranks, int64_t max_rows) {
  return n_ranks * max_rows * 4 * (1 + 2 * config.dim + 2 * config.router.n_active);
}

void CudaParcels::pack(const CudaLane& lane, const ExpertBatch& own, int32_t* counts,
                       const gpu::PackParcelsArgs& to) {
  like_[lane.number] = own;
  counts_[lane.number] = counts;
  const TensorView& ids = own.routing.ids;
  gpu::PackParcelsArgs args = to;
  args.chosen = {.ids = static_cast<const int32_t*>(ids.data),
                 .ids_stride = ids.stride,
                 .owners = p_.owners.of_layer(own.layer),
                 .tokens = static_cast<int>(own.x.rows),
                 .n_active = shape_.n_active,
                 .n_ranks = n_ranks_,
                 .rank = p_.ranks.rank(),
                 .hosts = p_.owners.hosts(),
                 .slots = slots_.as<int32_t>() + lane.first * n_ranks_,
                 .counts = counts};
  args.x = gpu_matrix(own.x);
  args.weights = gpu_matrix(own.routing.weights);
  args.shape = shape_;
  gpu::choose_ranks(p_.stream, args.chosen);
  gpu::pack_parcels(p_.stream, args);
}

CudaExchange::Here CudaParcels::unpack(const CudaLane& lane, int64_t n,
                                       const gpu::UnpackParcelsArgs& from) {
  const int64_t first = lane.first * n_ranks_, dim = shape_.dim, n_active = shape_.n_active;
  gpu::UnpackParcelsArgs args = from;
  args.rows = static_cast<int>(n);
  args.shape = shape_;
  args.x = x_.as<float>() + first * dim;
  args.ids = ids_.as<int32_t>() + first * n_active;
  args.weights = weights_.as<float>() + first * n_active;
  gpu::unpack_parcels(p_.stream, args);
  const TensorView sums = {sums_.as<float>() + first * dim, n, dim, dim};
  if (n > 0)
    gpu::clear(p_.stream, {gpu_matrix(sums), {}, static_cast<int>(n), static_cast<int>(dim)});
  sums_of_[lane.number] = sums;
  ExpertBatch batch = like_[lane.number];
  batch.first_row = 0;
  batch.x = {args.x, n, dim, dim};
  batch.routing.ids = {args.ids, n, n_active, n_active, DType::kI32};
  batch.routing.weights = {args.weights, n, n_active, n_active};
  return {batch, sums};
}

void CudaParcels::add_to(const CudaLane& lane, const std::byte* answers, int n_each, TensorView y) {
  gpu::add_sums(p_.stream, {.sums = answers,
                            .format = p_.formats.back,
                            .slots = slots_.as<int32_t>() + lane.first * n_ranks_,
                            .counts = counts_[lane.number],
                            .y = gpu_matrix(y),
                            .n_each = n_each,
                            .tokens = static_cast<int>(y.rows),
                            .n_ranks = n_ranks_,
                            .dim = shape_.dim});
}

}  // namespace tandem
