#include "engine/token_chooser.h"

namespace tandem {
TokenChooser::TokenChooser(StepRunner& model, const Vocabulary& vocabulary)
    : model_(model),
      vocabulary_(vocabulary),
      arena_(Arena::padded_bytes(int64_t{model.limits().max_logits} * model.config().vocab *
                                 size_of(DType::kF32))),
      logits_(arena_.matrix(model.limits().max_logits, model.config().vocab, DType::kF32)),
      device_sampler_(model.device().make_sampler(allowed_bits(vocabulary), vocabulary.size,
                                                  model.limits().max_logits)) {
  rows_.reserve(model.limits().max_logits);
  draws_.reserve(model.limits().max_logits);
  drawn_.resize(model.limits().max_logits);
}

// Copies the rows for the host before drawing, which overwrites logits. Adjacent rows are copied
// together.
void TokenChooser::begin(std::span<const Use> uses) {
  rows_.clear();
  draws_.clear();
  const TensorView logits = model_.logits();
  int64_t first = 0;  // first row that was not copied yet
  const auto bring = [&](int64_t end) {
    if (first < end)
      model_.device().to_host(logits.rows_from(first, end - first),
                              logits_.rows_from(first, end - first));
    first = end + 1;
  };
  for (const auto& [sampler, n_ahead] : uses) {
    const auto row = static_cast<int32_t>(rows_.size());
    const auto draw =
        device_sampler_ && sampler ? sampler->next_draw(row, n_ahead) : std::optional<Draw>();
    rows_.push_back({sampler, 0, draw.has_value()});
    if (!draw) continue;
    draws_.push_back(*draw);
    bring(row);
  }
  bring(static_cast<int64_t>(rows_.size()));
  if (draws_.empty()) return;
  device_sampler_->draw(logits, draws_, drawn_);
  for (size_t i = 0; i < draws_.size(); ++i) rows_[draws_[i].row].drawn = drawn_[i];
}

Sampled TokenChooser::token(size_t row) {
  const Row& r = rows_[row];
  if (r.on_device) return r.sampler->drew(r.drawn);
  return r.sampler->next(host_row(row));
}

Sampled TokenChooser::logprobs(size_t row, int32_t token, int n_top) {
  return with_logprobs(host_row(row), vocabulary_.holes, token, n_top, scratch_);
}

}  // namespace tandem
