#include "offload/gpu/cuda_gathered_experts.h"

#include <algorithm>

#include "gpu_kernels/exchange.h"
#include "model/micro_batches.h"
#include "ops/cuda_weights.h"

namespace tandem {
namespace {

// Micro-batches are of equal size, but each may have the rest of a whole sequence more.
int64_t most_rows(BackboneGrid grid, int max_tokens, int micro_batches) {
  const int n = micro_batches == ExpertPool::kMeasured ? kMaxMicroBatches : micro_batches;
  if (n == 1) return grid.most_tokens(max_tokens);
  return int64_t{n} * grid.most_tokens(most_tokens_of(n - 1, max_tokens));
}

}  // namespace

CudaGatheredExperts::CudaGatheredExperts(const ModelConfig& config, const Parts& parts,
                                         int max_tokens)
    : c_(config),
      p_(parts),
      stride_(gpu::packed_row_stride(config.dim, config.router.n_active)),
      max_rows_(most_rows(parts.grid, max_tokens, parts.micro_batches)),
      rows_(max_rows_ * stride_ * 4, gpu::Site::kDevice),
      sums_(max_rows_ * config.dim * 4, gpu::Site::kDevice),
      tokens_(max_rows_) {
  check(p_.mine_on_gpu || p_.micro_batches == 1, "a CPU's part divides no step");
}

int64_t CudaGatheredExperts::bytes_for(const ModelConfig& config, BackboneGrid grid, int max_tokens,
                                       int micro_batches) {
  return most_rows(grid, max_tokens, micro_batches) * 4 *
         (gpu::packed_row_stride(config.dim, config.router.n_active) + config.dim);
}

// All ranks send as many rows as the one with the most, so that the pieces are equal.
void CudaGatheredExperts::begin_step(std::span<const Batch> replicas, int n_micro_batches) {
  p_.ranks.begin_work();
  n_micro_batches_ = n_micro_batches;
  std::array<int64_t, kMaxTickets> most = {};
  for (int rank = 0; rank < p_.grid.n_ranks(); ++rank) {
    const MicroBatchCuts cuts =
        micro_batch_cuts(replicas[p_.grid.replica_of(rank)], n_micro_batches);
    for (int i = 0; i < n_micro_batches; ++i)
      most[i] = std::max(most[i], p_.grid.tokens_of(rank, cuts[i + 1] - cuts[i]).n);
  }
  int64_t first = 0;
  for (int i = 0; i < n_micro_batches; ++i) {
    lanes_[i].first = first;
    lanes_[i].n_of_rank = most[i];
    first += most[i] * p_.ranks.n_ranks();
  }
  check(first <= max_rows_, "the rows of all micro-batches fit their memory");
}

Ticket CudaGatheredExperts::start(const ExpertBatch& batch) {
  Lane& lane = lanes_[batch.micro_batch];
  if (lane.n_of_rank == 0) return batch.micro_batch;  // no rank has tokens in it
  const int n_active = c_.router.n_active;
  const auto [first, n] = p_.grid.tokens_of(p_.ranks.rank(), batch.x.rows);
  const TensorView x = batch.x.rows_from(first, n), ids = batch.routing.ids.rows_from(first, n);
  float* const packed = rows_.as<float>() + lane.first * stride_;
  gpu::pack_rows(p_.stream, {.x = gpu_matrix(x),
                             .ids = static_cast<const int32_t*>(ids.data),
                             .ids_stride = ids.stride,
                             .weights = gpu_matrix(batch.routing.weights.rows_from(first, n)),
                             .out = {packed + p_.ranks.rank() * lane.n_of_rank * stride_, stride_},
                             .tokens = static_cast<int>(n),
                             .rows = static_cast<int>(lane.n_of_rank),
                             .dim = static_cast<int>(c_.dim),
                             .n_active = n_active});
  p_.stream.record(ready_);
  p_.network.wait_for(ready_);
  p_.ranks.all_gather(p_.network, packed, lane.n_of_rank * stride_);
  p_.network.record(lane.there);
  const int64_t n_rows = lane.n_of_rank * p_.ranks.n_ranks();
  lane.batch = batch;
  lane.batch.first_row = 0;
  lane.batch.x = {packed, n_rows, c_.dim, stride_};
  lane.batch.routing.ids = {packed + c_.dim, n_rows, n_active, stride_, DType::kI32};
  lane.batch.routing.weights = {packed + c_.dim + n_active, n_rows, n_active, stride_};
  if (!p_.mine_on_gpu) {
    p_.stream.wait_for(lane.there);
    p_.mine.submit(lane.batch);
  }
  return batch.micro_batch;
}

bool CudaGatheredExperts::waits(Ticket ticket) {
  return p_.mine_on_gpu ? is_divided() : p_.mine.waits(ticket);
}

bool CudaGatheredExperts::serve(Ticket ticket) {
  Lane& lane = lanes_[ticket];
  if (!p_.mine_on_gpu || lane.n_of_rank == 0) return false;
  p_.stream.wait_for(lane.there);
  p_.mine.submit(lane.batch);
  send_sums(lane);
  return is_divided();
}

void CudaGatheredExperts::send_sums(Lane& lane) {
  const TensorView all = sums(lane);
  gpu::clear(p_.stream,
             {gpu_matrix(all), {}, static_cast<int>(all.rows), static_cast<int>(all.cols)});
  p_.mine.add_to(lane.batch.micro_batch, all);
  p_.stream.record(ready_);
  p_.network.wait_for(ready_);
  p_.ranks.reduce_scatter(p_.network, all.row<float>(0), lane.n_of_rank * c_.dim);
  p_.network.record(lane.there);
}

void CudaGatheredExperts::add_to(Ticket ticket, TensorView y) {
  Lane& lane = lanes_[ticket];
  if (lane.n_of_rank == 0) return;
  if (!p_.mine_on_gpu) send_sums(lane);
  p_.stream.wait_for(lane.there);
  const auto [first, n] = p_.grid.tokens_of(p_.ranks.rank(), y.rows);
  const TensorView own = sums(lane).rows_from(p_.ranks.rank() * lane.n_of_rank, n);
  gpu::add(p_.stream, {gpu_matrix(y.rows_from(first, n)), gpu_matrix(own), static_cast<int>(n),
                       static_cast<int>(y.cols)});
}

TensorView CudaGatheredExperts::sums(const Lane& lane) const {
  return {sums_.as<float>() + lane.first * c_.dim, lane.n_of_rank * p_.ranks.n_ranks(), c_.dim,
          c_.dim};
}

MicroBatches CudaGatheredExperts::all_rows() const {
  MicroBatches all;
  all.n = n_micro_batches_;
  for (int i = 0; i < all.n; ++i) {
    const int64_t n_rows = lanes_[i].n_of_rank * p_.ranks.n_ranks();
    all.at[i].tokens = std::span(tokens_).first(n_rows);
    all.at[i].sequences = std::span(&sequence_, n_rows > 0 ? 1 : 0);
    all.at[i].micro_batch = i;
  }
  return all;
}

void CudaGatheredExperts::follow(LayerRange layers, const MicroBatches&) {
  p_.mine.follow(layers, all_rows());
}

void CudaGatheredExperts::end_step(LayerRange layers, const MicroBatches&) {
  p_.mine.end_step(layers, all_rows());
}

}  // namespace tandem
