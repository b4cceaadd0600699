#include "offload/cuda_gathered_experts.h"

#include <algorithm>

#include "gpu_kernels/exchange.h"
#include "ops/cuda_weights.h"

namespace tandem {

CudaGatheredExperts::CudaGatheredExperts(const ModelConfig& config, const Parts& parts,
                                         int max_tokens)
    : c_(config),
      p_(parts),
      stride_(gpu::packed_row_stride(config.dim, config.router.n_active)),
      rows_(parts.grid.most_tokens(max_tokens) * stride_ * 4, gpu::Site::kDevice),
      sums_(parts.grid.most_tokens(max_tokens) * config.dim * 4, gpu::Site::kDevice),
      tokens_(parts.grid.most_tokens(max_tokens)) {}

int64_t CudaGatheredExperts::bytes_for(const ModelConfig& config, BackboneGrid grid,
                                       int max_tokens) {
  return grid.most_tokens(max_tokens) * 4 *
         (gpu::packed_row_stride(config.dim, config.router.n_active) + config.dim);
}

// All ranks send as many rows as the one with the most, so that the pieces are equal.
void CudaGatheredExperts::begin_step(std::span<const Batch> replicas, int) {
  p_.ranks.begin_work();
  n_of_rank_ = 0;
  for (int rank = 0; rank < p_.grid.n_ranks(); ++rank)
    n_of_rank_ =
        std::max(n_of_rank_, p_.grid.tokens_of(rank, replicas[p_.grid.replica_of(rank)].n()).n);
}

Ticket CudaGatheredExperts::start(const ExpertBatch& batch) {
  check(batch.first_row == 0, "ranks exchange the rows of one micro-batch");
  const int n_active = c_.router.n_active;
  const auto [first, n] = p_.grid.tokens_of(p_.ranks.rank(), batch.x.rows);
  const TensorView x = batch.x.rows_from(first, n), ids = batch.routing.ids.rows_from(first, n);
  float* const packed = rows_.as<float>();
  gpu::pack_rows(p_.stream, {.x = gpu_matrix(x),
                             .ids = static_cast<const int32_t*>(ids.data),
                             .ids_stride = ids.stride,
                             .weights = gpu_matrix(batch.routing.weights.rows_from(first, n)),
                             .out = {packed + p_.ranks.rank() * n_of_rank_ * stride_, stride_},
                             .tokens = static_cast<int>(n),
                             .rows = static_cast<int>(n_of_rank_),
                             .dim = static_cast<int>(c_.dim),
                             .n_active = n_active});
  p_.ranks.all_gather(p_.stream, packed, n_of_rank_ * stride_);
  ExpertBatch all = batch;
  all.x = {packed, n_rows(), c_.dim, stride_};
  all.routing.ids = {packed + c_.dim, n_rows(), n_active, stride_, DType::kI32};
  all.routing.weights = {packed + c_.dim + n_active, n_rows(), n_active, stride_};
  return p_.mine.submit(all);
}

void CudaGatheredExperts::add_to(Ticket ticket, TensorView y) {
  const TensorView all = sums();
  gpu::clear(p_.stream,
             {gpu_matrix(all), {}, static_cast<int>(all.rows), static_cast<int>(all.cols)});
  p_.mine.add_to(ticket, all);
  p_.ranks.reduce_scatter(p_.stream, all.row<float>(0), n_of_rank_ * c_.dim);
  const auto [first, n] = p_.grid.tokens_of(p_.ranks.rank(), y.rows);
  const TensorView own = all.rows_from(p_.ranks.rank() * n_of_rank_, n);
  gpu::add(p_.stream, {gpu_matrix(y.rows_from(first, n)), gpu_matrix(own), static_cast<int>(n),
                       static_cast<int>(y.cols)});
}

MicroBatches CudaGatheredExperts::all_rows() const {
  MicroBatches all;
  all.at[0].tokens = std::span(tokens_).first(n_rows());
  all.at[0].sequences = std::span(&sequence_, 1);
  return all;
}

void CudaGatheredExperts::follow(LayerRange layers, const MicroBatches&) {
  p_.mine.follow(layers, all_rows());
}

void CudaGatheredExperts::end_step(LayerRange layers, const MicroBatches&) {
  p_.mine.end_step(layers, all_rows());
}

}  // namespace tandem
