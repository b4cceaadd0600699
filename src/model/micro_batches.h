// Divides a step into micro-batches, which pass through the layers alternately: the same division
// on every rank, from the sizes of the sequences alone.
#pragma once
#include <array>
#include <vector>

#include "model/batch.h"

namespace tandem {

// The tokens at which n micro-batches of a step begin, and where the last one ends: equal numbers
// of tokens, but a sequence of few tokens (one token and drafts) stays whole and belongs to the
// earlier one. Micro-batches may be empty. Entries after the n-th are the number of tokens.
using MicroBatchCuts = std::array<int, kMaxMicroBatches + 1>;
MicroBatchCuts micro_batch_cuts(const Batch& step, int n);

// The most tokens of micro-batch `index` in a step of up to n_tokens tokens that is divided into
// any number of micro-batches.
int most_tokens_of(int micro_batch, int n_tokens);

// Appends the sequences of tokens [first, end) of a step, of which the first and the last may be
// parts of longer ones. Their first_token counts from token `origin` of the step.
void append_sequences(const Batch& step, int first, int end, int origin,
                      std::vector<Sequence>& sequences);

class MicroBatchDivider {
 public:
  // For steps of up to max_tokens tokens.
  explicit MicroBatchDivider(int max_tokens);
  // Valid until the next call, as long as `step` is. A sequence may continue in the next
  // micro-batch, whose tokens of a layer are computed after those before them.
  MicroBatches divide(const Batch& step, int n);
  // The step of the last call, with the sequences of its micro-batches one after the other: a GPU
  // knows them by their place in it.
  const Batch& whole() const { return whole_; }

 private:
  std::vector<Sequence> sequences_;
  Batch whole_;
};

}  // namespace tandem
