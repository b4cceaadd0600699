#include "engine/deepseek.h"

namespace tandem {

void DeepSeek::join(int module, HiddenStates states, const Batch& step) {
  const MtpWeights& w = w_.mtp[module];
  const int64_t n = step.n();
  const TensorView hidden = scratch_.hidden.rows_from(0, n);
  if (states == HiddenStates::kOfModel) {
    ops_.gather_rows(scratch_.x, step.hidden_rows, hidden);
    ops_.rms_norm(hidden, w_.final_norm, c_.norm_eps, hidden);
  }
  if (states == HiddenStates::kOfLogits) ops_.gather_rows(scratch_.last, step.hidden_rows, hidden);
  const TensorView joined = scratch_.joined.rows_from(0, n);
  const TensorView embedding = joined.cols_from(0, c_.dim),
                   state = joined.cols_from(c_.dim, c_.dim);
  ops_.embed(step.tokens, w.embed.empty() ? w_.embed : w.embed, embedding);
  ops_.rms_norm(embedding, w.embed_norm, c_.norm_eps, embedding);
  ops_.rms_norm(hidden, w.hidden_norm, c_.norm_eps, state);
  ops_.linear(joined, w.projection, scratch_.x.rows_from(0, n));
}

void DeepSeek::mtp_head(int module, const Batch& step) {
  const MtpWeights& w = w_.mtp[module];
  const TensorView hidden = scratch_.hidden.rows_from(0, step.n());
  if (step.n() > 0) ops_.rms_norm(scratch_.x.rows_from(0, step.n()), w.norm, c_.norm_eps, hidden);
  const int64_t n = std::ssize(step.logit_rows);
  const TensorView last = scratch_.last.rows_from(0, n);
  if (n > 0) ops_.gather_rows(hidden, step.logit_rows, last);
  project_to_vocabulary(last, c_.mtp_has_head ? w.head : w_.head);
}

}  // namespace tandem
