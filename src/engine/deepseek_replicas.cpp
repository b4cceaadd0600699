// What the ranks of all replicas of the backbone divide (SharedByReplicas): a rank computes its
// columns for the rows of all replicas.
#include <algorithm>
#include <numeric>

#include "engine/deepseek.h"
#include "model/micro_batches.h"

namespace tandem {

void DeepSeek::begin_step(std::span<const Batch> replicas, int n_micro_batches) {
  if (!shares()) return;
  for (std::vector<int64_t>& of_replicas : tokens_of_replicas_) of_replicas.clear();
  logits_of_replicas_.clear();
  for (const Batch& batch : replicas) {
    const MicroBatchCuts cuts = micro_batch_cuts(batch, n_micro_batches);
    for (int i = 0; i < n_micro_batches; ++i)
      tokens_of_replicas_[i].push_back(cuts[i + 1] - cuts[i]);
    logits_of_replicas_.push_back(std::ssize(batch.logit_rows));
  }
}

// Calls visit(first row of each replica, rows of all) for pieces of up to max_rows rows in piece_,
// as many of each replica as it has.
template <class Visit>
void DeepSeek::for_each_piece(std::span<const int64_t> n_rows, int64_t max_rows, Visit visit) {
  const int64_t most = *std::max_element(n_rows.begin(), n_rows.end());
  const int64_t n_of_replica = std::max<int64_t>(1, max_rows / std::ssize(n_rows));
  for (int64_t first = 0; first < most; first += n_of_replica) {
    piece_.clear();
    for (const int64_t n : n_rows)
      piece_.push_back(std::clamp<int64_t>(n - first, 0, n_of_replica));
    visit(first, std::accumulate(piece_.begin(), piece_.end(), int64_t{0}));
  }
}

void DeepSeek::divided_feed_forward(int layer, int micro_batch, TensorView h, TensorView y) {
  const auto visit = [&](int64_t first, int64_t n) {
    const int64_t n_own = piece_[replica_], own = std::min(first, h.rows);
    Scratch all = scratch_;
    all.h = scratch_.all_h.rows_from(0, n);
    all.y = scratch_.all_y.rows_from(0, n);
    all.gate = scratch_.gate.rows_from(0, n);
    all.up = scratch_.up.rows_from(0, n);
    ops_.gather_replicas(h.rows_from(own, n_own), piece_, all.h);
    feed_forward(w_.layers[layer].ffn, all);
    ops_.scatter_replicas(all.y, piece_, y.rows_from(own, n_own));
  };
  for_each_piece(tokens_of_replicas_[micro_batch], limits_.max_tokens, visit);
}

// The columns of the like ranks, for the rows of this replica.
void DeepSeek::divided_logits(TensorView rows, const QuantView& head, TensorView logits) {
  const auto visit = [&](int64_t first, int64_t n) {
    const int64_t n_own = piece_[replica_], own = std::min(first, rows.rows);
    const TensorView all = scratch_.all_h.rows_from(0, n);
    const TensorView columns = {scratch_.all_logits.data, n, share_.head().n, share_.head().n};
    ops_.gather_replicas(rows.rows_from(own, n_own), piece_, all);
    if (columns.cols > 0) ops_.linear(all, head, columns);
    ops_.exchange_replicas(columns, piece_, logits.rows_from(own, n_own), share_.vocab_of_replicas,
                           scratch_.exchanged);
  };
  for_each_piece(logits_of_replicas_, limits_.max_logits, visit);
}

}  // namespace tandem
