#include "model/micro_batches.h"

#include <algorithm>

#include "core/check.h"
#include "core/rounding.h"

namespace tandem {
namespace {

constexpr int kWholeTokens = 1 + kMaxDraftTokens;  // sequences of so many are not cut

}  // namespace

MicroBatchCuts micro_batch_cuts(const Batch& step, int n) {
  check(n >= 1 && n <= kMaxMicroBatches, "micro-batches of a step");
  MicroBatchCuts cuts;
  cuts.fill(step.n());
  cuts[0] = 0;
  auto sequence = step.sequences.begin();
  for (int i = 1; i < n; ++i) {
    int cut = static_cast<int>(ceil_div(int64_t{step.n()} * i, n));
    while (sequence != step.sequences.end() && sequence->first_token + sequence->n_tokens < cut)
      ++sequence;
    if (sequence != step.sequences.end() && sequence->n_tokens <= kWholeTokens &&
        sequence->first_token < cut)
      cut = sequence->first_token + sequence->n_tokens;
    cuts[i] = cut;
  }
  return cuts;
}

// A step with micro-batch i has at least i + 1 of them, so i has at most that part of the tokens
// and the rest of a whole sequence.
int most_tokens_of(int micro_batch, int n_tokens) {
  if (micro_batch == 0) return n_tokens;
  const int share = static_cast<int>(ceil_div(int64_t{n_tokens}, micro_batch + 1));
  return std::min(n_tokens, share + kWholeTokens);
}

void append_sequences(const Batch& step, int first, int end, int origin,
                      std::vector<Sequence>& sequences) {
  for (const Sequence& s : step.sequences) {
    const int begin = std::max(first, s.first_token);
    const int stop = std::min(end, s.first_token + s.n_tokens);
    if (begin >= stop) continue;
    const int n_later = s.first_token + s.n_tokens - stop;
    sequences.push_back({begin - origin, stop - begin, s.kv_length - n_later, s.kv_pages});
  }
}

MicroBatchDivider::MicroBatchDivider(int max_tokens) {
  sequences_.reserve(max_tokens + kMaxMicroBatches);
}

MicroBatches MicroBatchDivider::divide(const Batch& step, int n) {
  whole_ = step;
  if (n == 1) return {{step}, 1};
  const MicroBatchCuts cuts = micro_batch_cuts(step, n);
  sequences_.clear();
  MicroBatches parts{.at = {}, .n = n};
  for (int i = 0; i < n && i < kMaxMicroBatches; ++i) {
    const int first = cuts[i], end = cuts[i + 1];
    const size_t first_sequence = sequences_.size();
    append_sequences(step, first, end, 0, sequences_);
    const auto n_tokens = static_cast<size_t>(end - first);
    parts.at[i] = {.tokens = step.tokens.subspan(first, n_tokens),
                   .positions = step.positions.subspan(first, n_tokens),
                   .sequences = std::span(sequences_).subspan(first_sequence),
                   .logit_rows = step.logit_rows,
                   .micro_batch = i};
  }
  whole_.sequences = sequences_;
  return parts;
}

}  // namespace tandem
