#include "offload/gpu/exchange/cuda_exchanged_experts.h"

#include <algorithm>

#include "model/micro_batches.h"

namespace tandem {

CudaExchangedExperts::CudaExchangedExperts(const Parts& parts, CudaWays ways)
    : p_(parts),
      ways_(std::move(ways)),
      way_(ways_.prompts.get()),
      tokens_(way_->max_rows() * p_.ranks.n_ranks()) {
  check(p_.mine_on_gpu || p_.micro_batches == 1, "a CPU's part divides no step");
  check(p_.mine_on_gpu || can_record(ways_.of_prompts.mode),
        "a CPU's part knows how many rows it gets");
}

uint64_t CudaExchangedExperts::progress() const {
  return ways_.prompts->progress() + (ways_.decode ? ways_.decode->progress() : 0);
}

// A step that may be recorded goes the way of decode. All ranks have as much room as the one with
// the most rows needs.
void CudaExchangedExperts::begin_step(std::span<const Batch> replicas, int n_micro_batches) {
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
    lanes_[i] = {.number = i, .first = first, .n_of_rank = most[i]};
    first += most[i];
  }
  const bool is_small = std::all_of(replicas.begin(), replicas.end(), [](const Batch& batch) {
    return batch.n() <= CudaWays::kDecodeTokens;
  });
  way_ = is_small && ways_.decode ? ways_.decode.get() : ways_.prompts.get();
  check(first <= way_->max_rows(), "the rows of all micro-batches fit their memory");
}

Ticket CudaExchangedExperts::start(const ExpertBatch& batch) {
  const Ticket ticket = batch.micro_batch;
  if (lanes_[ticket].n_of_rank == 0) return ticket;  // no rank has tokens in it
  const auto [first, n] = p_.grid.tokens_of(p_.ranks.rank(), batch.x.rows);
  ExpertBatch own = batch;
  own.x = batch.x.rows_from(first, n);
  own.routing = {batch.routing.ids.rows_from(first, n), batch.routing.weights.rows_from(first, n)};
  way_->send(lanes_[ticket], own);
  if (!p_.mine_on_gpu) submit_arrived(ticket);
  return ticket;
}

bool CudaExchangedExperts::waits(Ticket ticket) {
  if (!p_.mine_on_gpu) return p_.mine.waits(ticket);
  if (lanes_[ticket].n_of_rank > 0) way_->send_counted(lanes_[ticket]);
  return is_divided();
}

bool CudaExchangedExperts::serve(Ticket ticket) {
  if (!p_.mine_on_gpu || lanes_[ticket].n_of_rank == 0) return false;
  submit_arrived(ticket);
  send_sums(ticket);
  return is_divided();
}

void CudaExchangedExperts::submit_arrived(Ticket ticket) {
  here_[ticket] = way_->arrived(lanes_[ticket]);
  if (here_[ticket].batch.x.rows > 0) p_.mine.submit(here_[ticket].batch);
}

void CudaExchangedExperts::send_sums(Ticket ticket) {
  const TensorView sums = here_[ticket].sums;
  if (sums.rows > 0) p_.mine.add_to(ticket, sums);
  way_->send_back(lanes_[ticket]);
}

void CudaExchangedExperts::add_to(Ticket ticket, TensorView y) {
  if (lanes_[ticket].n_of_rank == 0) return;
  if (!p_.mine_on_gpu) send_sums(ticket);
  const auto [first, n] = p_.grid.tokens_of(p_.ranks.rank(), y.rows);
  way_->add_to(lanes_[ticket], y.rows_from(first, n));
}

MicroBatches CudaExchangedExperts::all_rows() const {
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

void CudaExchangedExperts::follow(LayerRange layers, const MicroBatches&) {
  p_.mine.follow(layers, all_rows());
}

void CudaExchangedExperts::end_step(LayerRange layers, const MicroBatches&) {
  p_.mine.end_step(layers, all_rows());
}

}  // namespace tandem
