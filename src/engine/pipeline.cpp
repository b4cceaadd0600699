#include "engine/pipeline.h"

#include <algorithm>

#include "core/check.h"
#include "model/micro_batches.h"

namespace tandem {

Pipeline::Pipeline(BackboneGrid grid, int max_tokens) : grid_(grid) {
  if (grid.n_stages == 1) return;
  const int most = n_pieces(max_tokens), n_replicas = grid.n_replicas;
  pieces_.reserve(most);
  batches_.reserve(int64_t{most} * n_replicas);
  first_logits_.reserve(int64_t{most} * n_replicas);
  sequences_.reserve(int64_t{n_replicas} * (max_tokens + most));  // pieces may begin within one
  logit_rows_.reserve(int64_t{n_replicas} * max_tokens);
}

int Pipeline::n_pieces(int n_tokens) const {
  return std::clamp(n_tokens / kLeastTokens, 1, kMostPieces * grid_.n_stages);
}

int Pipeline::n_pieces(std::span<const Batch> replicas) const {
  int n = 1;
  for (const Batch& batch : replicas) n = std::max(n, n_pieces(batch.n()));
  return n;
}

bool Pipeline::divides(std::span<const Batch> replicas) const {
  return grid_.n_stages > 1 && n_pieces(replicas) > 1;
}

std::span<const PipelinePiece> Pipeline::pieces_of(std::span<const Batch> replicas) {
  pieces_.clear();
  batches_.clear();
  first_logits_.clear();
  sequences_.clear();
  logit_rows_.clear();
  const int n = n_pieces(replicas);
  for (int i = 0; i < n; ++i) {
    for (size_t r = 0; r < replicas.size(); ++r) {
      const PipelinePiece* const before = i > 0 ? &pieces_.back() : nullptr;
      first_logits_.push_back(
          before ? before->first_logits[r] + std::ssize(before->batches[r].logit_rows) : 0);
      batches_.push_back(piece_of(replicas[r], i, n));
    }
    pieces_.push_back({std::span(batches_).last(replicas.size()),
                       std::span(first_logits_).last(replicas.size())});
  }
  return pieces_;
}

Batch Pipeline::piece_of(const Batch& step, int i, int n) {
  const int first = step.n() * i / n, end = step.n() * (i + 1) / n;
  const size_t first_sequence = sequences_.size(), first_row = logit_rows_.size();
  append_sequences(step, first, end, first, sequences_);
  for (const int32_t row : step.logit_rows)
    if (row >= first && row < end) logit_rows_.push_back(row - first);
  const auto n_tokens = static_cast<size_t>(end - first);
  return {.tokens = step.tokens.subspan(first, n_tokens),
          .positions = step.positions.subspan(first, n_tokens),
          .sequences = std::span(sequences_).subspan(first_sequence),
          .logit_rows = std::span(logit_rows_).subspan(first_row)};
}

StageQueue::StageQueue(BackboneGrid grid, int stage) : steps_(stage + 1) {
  for (Copy& copy : steps_) {
    copy.arrays.resize(grid.n_replicas, StepArrays(0));
    copy.replicas.resize(grid.n_replicas);
  }
}

void StageQueue::push(const Step& step) {
  Copy& copy = steps_[oldest_];
  oldest_ = (oldest_ + 1) % steps_.size();
  check(step.replicas.size() == copy.replicas.size(), "a batch for each replica");
  copy.n_micro_batches = step.n_micro_batches;
  for (size_t r = 0; r < step.replicas.size(); ++r) {
    copy.arrays[r].copy(step.replicas[r]);
    copy.replicas[r] = copy.arrays[r].batch();
  }
}

void StageQueue::clear() {
  for (Copy& copy : steps_) std::ranges::fill(copy.replicas, Batch());
}

}  // namespace tandem
