#include "engine/mtp_drafts.h"

#include <algorithm>

namespace tandem {

MtpDrafts::MtpDrafts(StepRunner& model, KvCache& cache, const Vocabulary& vocabulary,
                     int n_host_pages)
    : model_(model),
      cache_(cache),
      vocabulary_size_(vocabulary.size),
      n_modules_(model.config().n_used_mtp_layers),
      device_sampler_(model.device().make_sampler(allowed_bits(vocabulary), vocabulary.size,
                                                  model.limits().max_logits)),
      n_filled_(cache.n_pages()),
      n_filled_on_host_(n_host_pages),
      step_(model.limits().max_tokens) {
  check(n_modules_ > 0, "the layers for multi-token prediction are loaded");
  if (device_sampler_) return;
  const int64_t n = model.limits().max_logits, vocab = model.config().vocab;
  arena_ = Arena(Arena::padded_bytes(n * vocab * size_of(DType::kF32)));
  logits_ = arena_.matrix(n, vocab, DType::kF32);
}

std::vector<int32_t> MtpDrafts::draft(SequenceId id, std::span<const int32_t> tokens, int n) {
  const auto it = drafts_.find(id);
  if (it == drafts_.end() || it->second.position != std::ssize(tokens)) return {};
  std::vector<int32_t> drafts = it->second.tokens;
  drafts.resize(std::clamp<int>(n, 0, static_cast<int>(drafts.size())));
  return drafts;
}

// Rows that were filled for an earlier use of the page do not count.
void MtpDrafts::will_compute(std::span<const int32_t> pages, int first, int n) {
  for (int page = first / kPageSize; page <= (first + n - 1) / kPageSize; ++page) {
    uint8_t& filled = n_filled_[pages[page]];
    filled = static_cast<uint8_t>(std::min<int>(filled, std::max(0, first - page * kPageSize)));
  }
}

void MtpDrafts::copied(const PageCopy& copy) {
  switch (copy.way) {
    case PageCopy::Way::kToHost:
      n_filled_on_host_[copy.other] = n_filled_[copy.page];
      break;
    case PageCopy::Way::kFromHost:
      n_filled_[copy.page] = n_filled_on_host_[copy.other];
      break;
    case PageCopy::Way::kWithin:
      n_filled_[copy.page] = n_filled_[copy.other];
      break;
  }
}

void MtpDrafts::step_done(std::span<const Advance> sequences, bool follows) {
  parts_.clear();
  for (const Advance& s : sequences) {
    drafts_.erase(s.id);
    if (!follows) continue;
    if (const std::optional<Part> part = fill(s)) parts_.push_back(*part);
  }
  if (parts_.empty()) return;
  for (int module = 0; module < n_modules_; ++module) run_layer(module);
  while (!drafted_.empty()) apply_again();
}

// The part of a sequence's new rows that can be filled; none if its page is not filled up to there.
// Pages that another sequence has filled with the same tokens stay as they are.
std::optional<MtpDrafts::Part> MtpDrafts::fill(const Advance& s) {
  const int end = s.first + s.n;
  int first = s.first;
  const auto filled = [&](int position) -> uint8_t& {
    return n_filled_[s.pages[position / kPageSize]];
  };
  while (first < end && filled(first) != first % kPageSize)
    first = (first / kPageSize + 1) * kPageSize;
  if (first >= end) return {};
  const Part part = {&s, first, end, first_page_of(s.pages, first / kPageSize)};
  for (int page = first / kPageSize; page <= (end - 1) / kPageSize; ++page)
    n_filled_[s.pages[page]] = static_cast<uint8_t>(std::min(end - page * kPageSize, kPageSize));
  return part;
}

// The first of the filled pages that end before `page`.
int MtpDrafts::first_page_of(std::span<const int32_t> pages, int page) const {
  while (page > 0 && n_filled_[pages[page - 1]] == kPageSize) --page;
  return page;
}

// Fills the rows of all parts, and drafts a token for those that want one. A layer behind the first
// takes drafts where the text ends, or the last token if nothing was drafted.
void MtpDrafts::run_layer(int module) {
  step_.clear();
  drafted_.clear();
  std::vector<std::vector<int32_t>> texts;
  texts.reserve(parts_.size());
  for (const Part& part : parts_) {
    const Advance& s = *part.of;
    std::vector<int32_t>& text = texts.emplace_back();
    for (int i = part.first; i < part.end; ++i) {
      const auto at = static_cast<size_t>(i) + 1 + static_cast<size_t>(module);
      const std::vector<int32_t>& drafts = drafts_[s.id].tokens;
      const size_t ahead = std::min(at - std::min(at, s.tokens.size() - 1), drafts.size());
      text.push_back(ahead > 0 ? drafts[ahead - 1] : s.tokens[std::min(at, s.tokens.size() - 1)]);
      step_.add_hidden_row(s.row + i - s.first);
    }
    const bool drafts = module < s.n_drafts && std::ssize(drafts_[s.id].tokens) == module;
    step_.add_window({.tokens = text,
                      .pages = s.pages.subspan(part.first_page),
                      .first = part.first,
                      .first_page = part.first_page,
                      .n_logits = drafts ? 1 : 0});
    if (drafts) drafted_.push_back(&part);
  }
  compute(module, module == 0 ? HiddenStates::kOfModel : HiddenStates::kOfLayer);
}

// Applies the last layer to the sequences that want more drafts and have a row for them in their
// pages.
void MtpDrafts::apply_again() {
  step_.clear();
  std::vector<const Part*> goes_on;
  for (size_t i = 0; i < drafted_.size(); ++i) {
    const Part& part = *drafted_[i];
    const Advance& s = *part.of;
    const std::vector<int32_t>& drafts = drafts_[s.id].tokens;
    const int position = part.end - n_modules_ + static_cast<int>(drafts.size());
    if (drafts.empty() || std::ssize(drafts) >= s.n_drafts ||
        position / kPageSize >= std::ssize(s.pages))
      continue;
    goes_on.push_back(&part);
    step_.add_hidden_row(static_cast<int>(i));
    step_.add_window({.tokens = std::span(&drafts.back(), 1),
                      .pages = s.pages.subspan(part.first_page),
                      .first = position,
                      .first_page = part.first_page,
                      .n_logits = 1});
  }
  drafted_ = std::move(goes_on);
  if (!drafted_.empty()) compute(n_modules_ - 1, HiddenStates::kOfLogits);
}

void MtpDrafts::compute(int module, HiddenStates states) {
  model_.draft(module, states, step_.batch(), cache_);
  take_drafts();
}

// Drafts the most likely token of each row of logits, none if they are not finite.
void MtpDrafts::take_drafts() {
  if (drafted_.empty()) return;
  std::vector<int32_t> tokens(drafted_.size());
  choose(tokens);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const Advance& s = *drafted_[i]->of;
    Drafts& drafts = drafts_[s.id];
    drafts.position = static_cast<int>(s.tokens.size());
    if (tokens[i] >= 0) drafts.tokens.push_back(tokens[i]);
  }
}

void MtpDrafts::choose(std::span<int32_t> tokens) {
  const auto n = static_cast<int64_t>(tokens.size());
  if (device_sampler_) {
    std::vector<Draw> draws;
    for (int32_t row = 0; row < n; ++row) draws.push_back({row, 0, 1, 0, 0, 0});
    return device_sampler_->draw(model_.logits(), draws, tokens);
  }
  model_.device().to_host(model_.logits().rows_from(0, n), logits_.rows_from(0, n));
  for (int64_t i = 0; i < n; ++i) {
    const float* const row = logits_.row<float>(i);
    tokens[i] = static_cast<int32_t>(std::max_element(row, row + vocabulary_size_) - row);
  }
}

}  // namespace tandem
