#include "engine/mtp_drafts.h"

#include <algorithm>

namespace tandem {

MtpDrafts::MtpDrafts(StepRunner& model, KvCache& cache, int vocabulary_size, int n_host_pages)
    : model_(model),
      cache_(cache),
      vocabulary_size_(vocabulary_size),
      n_modules_(model.config().n_used_mtp_layers),
      n_filled_(cache.n_pages()),
      n_filled_on_host_(n_host_pages),
      step_(model.limits().max_tokens),
      arena_(Arena::padded_bytes(int64_t{model.limits().max_logits} * model.config().vocab *
                                 size_of(DType::kF32))),
      logits_(arena_.matrix(model.limits().max_logits, model.config().vocab, DType::kF32)) {
  check(n_modules_ > 0, "the layers for multi-token prediction are loaded");
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
  rows_.clear();
  for (const Part& part : parts_)
    for (int i = part.first; i < part.end; ++i) rows_.push_back(part.of->row + i - part.of->first);
  model_.take_hidden(rows_);
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
      const auto at = static_cast<size_t>(i + 1 + module);
      const std::vector<int32_t>& drafts = drafts_[s.id].tokens;
      const size_t ahead = std::min(at - std::min(at, s.tokens.size() - 1), drafts.size());
      text.push_back(ahead > 0 ? drafts[ahead - 1] : s.tokens[std::min(at, s.tokens.size() - 1)]);
    }
    const bool drafts = module < s.n_drafts && std::ssize(drafts_[s.id].tokens) == module;
    step_.add_window({.tokens = text,
                      .pages = s.pages.subspan(part.first_page),
                      .first = part.first,
                      .first_page = part.first_page,
                      .n_logits = drafts ? 1 : 0});
    if (drafts) drafted_.push_back(&part);
  }
  model_.draft(module, step_.batch(), cache_);
  take_logits(drafted_);
}

// Applies the last layer to the sequences that want more drafts and have a row for them in their
// pages.
void MtpDrafts::apply_again() {
  step_.clear();
  rows_.clear();
  std::vector<const Part*> goes_on;
  for (size_t i = 0; i < drafted_.size(); ++i) {
    const Part& part = *drafted_[i];
    const Advance& s = *part.of;
    const std::vector<int32_t>& drafts = drafts_[s.id].tokens;
    const int position = part.end - n_modules_ + static_cast<int>(drafts.size());
    if (std::ssize(drafts) >= s.n_drafts || position / kPageSize >= std::ssize(s.pages)) continue;
    goes_on.push_back(&part);
    rows_.push_back(static_cast<int32_t>(i));
    step_.add_window({.tokens = std::span(&drafts.back(), 1),
                      .pages = s.pages.subspan(part.first_page),
                      .first = position,
                      .first_page = part.first_page,
                      .n_logits = 1});
  }
  drafted_ = std::move(goes_on);
  if (drafted_.empty()) return;
  model_.take_drafted(rows_);
  model_.draft(n_modules_ - 1, step_.batch(), cache_);
  take_logits(drafted_);
}

// Drafts the most likely token of each row.
void MtpDrafts::take_logits(std::span<const Part* const> drafted) {
  if (drafted.empty()) return;
  const auto n = static_cast<int64_t>(drafted.size());
  const TensorView logits = logits_.rows_from(0, n);
  model_.device().to_host(model_.logits().rows_from(0, n), logits);
  for (int64_t i = 0; i < n; ++i) {
    const float* const row = logits.row<float>(i);
    const Advance& s = *drafted[i]->of;
    Drafts& drafts = drafts_[s.id];
    drafts.position = static_cast<int>(s.tokens.size());
    drafts.tokens.push_back(
        static_cast<int32_t>(std::max_element(row, row + vocabulary_size_) - row));
  }
}

}  // namespace tandem
