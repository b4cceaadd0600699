#include "engine/token_chooser.h"

namespace tandem {
namespace {

int64_t most_rows(const StepRunner& model) {
  return int64_t{model.n_replicas()} * model.limits().max_logits;
}

}  // namespace

TokenChooser::TokenChooser(StepRunner& model, const Vocabulary& vocabulary)
    : model_(model),
      vocabulary_(vocabulary),
      allowed_(allowed_bits(vocabulary)),
      arena_(Arena::padded_bytes(most_rows(model) * model.config().vocab * size_of(DType::kF32))),
      logits_(arena_.matrix(most_rows(model), model.config().vocab, DType::kF32)),
      draws_(model.n_replicas()),
      copied_(model.n_replicas()),
      wanted_(model.n_replicas()) {
  rows_.reserve(most_rows(model));
  drawn_.resize(most_rows(model));
  for (int r = 0; r < model.n_replicas(); ++r) {
    draws_[r].reserve(model.limits().max_logits);
    copied_[r].reserve(model.limits().max_logits);
  }
  model.set_vocabulary({allowed_, vocabulary.size});
}

void TokenChooser::begin(std::span<const Use> uses) {
  model_.set_vocabulary({allowed_, vocabulary_.size});  // of several engines each has its own
  rows_.clear();
  for (auto& draws : draws_) draws.clear();
  for (auto& copied : copied_) copied.clear();
  int64_t n_drawn = 0, n_copied = 0;
  for (const auto& [sampler, n_ahead, replica] : uses) {
    auto& draws = draws_[replica];
    auto& copied = copied_[replica];
    const auto row = static_cast<int32_t>(draws.size() + copied.size());
    const auto draw =
        model_.draws() && sampler ? sampler->next_draw(row, n_ahead) : std::optional<Draw>();
    rows_.push_back({sampler, draw.has_value(), n_drawn, n_copied});
    if (draw) {
      draws.push_back(*draw);
      ++n_drawn;
    } else {
      copied.push_back(row);
      ++n_copied;
    }
  }
  for (size_t r = 0; r < wanted_.size(); ++r) wanted_[r] = {copied_[r], draws_[r]};
  model_.read_logits(wanted_, drawn_, logits_);
}

Sampled TokenChooser::token(size_t row) {
  const Row& r = rows_[row];
  if (r.is_drawn) return r.sampler->drew(drawn_[r.drawn]);
  return r.sampler->next(host_row(row));
}

Sampled TokenChooser::logprobs(size_t row, int32_t token, int n_top) {
  return with_logprobs(host_row(row), vocabulary_.holes, token, n_top, scratch_);
}

}  // namespace tandem
