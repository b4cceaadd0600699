#include "engine/drafts/mtp_drafts.h"

#include <algorithm>

namespace tandem {

MtpDrafts::MtpDrafts(StepRunner& model, KvCache& cache, int n_host_pages)
    : model_(model),
      cache_(cache),
      n_modules_(model.config().n_used_mtp_layers),
      n_filled_(model.n_replicas(), std::vector<uint8_t>(cache.n_pages())),
      n_filled_on_host_(model.n_replicas(), std::vector<uint8_t>(n_host_pages)),
      steps_(model.n_replicas(), StepArrays(model.limits().max_tokens)) {
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
void MtpDrafts::will_compute(int replica, std::span<const int32_t> pages, int first, int n) {
  for (int page = first / kPageSize; page <= (first + n - 1) / kPageSize; ++page) {
    uint8_t& filled = n_filled_[replica][pages[page]];
    filled = static_cast<uint8_t>(std::min<int>(filled, std::max(0, first - page * kPageSize)));
  }
}

void MtpDrafts::copied(int replica, const PageCopy& copy) {
  std::vector<uint8_t>&n_filled = n_filled_[replica], &on_host = n_filled_on_host_[replica];
  switch (copy.way) {
    case PageCopy::Way::kToHost:
      on_host[copy.other] = n_filled[copy.page];
      break;
    case PageCopy::Way::kFromHost:
      n_filled[copy.page] = on_host[copy.other];
      break;
    case PageCopy::Way::kWithin:
      n_filled[copy.page] = n_filled[copy.other];
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
  try {
    for (int module = 0; module < n_modules_; ++module) run_layer(module);
    while (!drafted_.empty()) apply_again();
  } catch (...) {  // the rows may not be filled
    for (const Part& part : parts_)
      will_compute(part.of->replica, part.of->pages, part.first, part.end - part.first);
    throw;
  }
}

// The part of a sequence's new rows that can be filled; none if its page is not filled up to there.
// Pages that another sequence has filled with the same tokens stay as they are.
std::optional<MtpDrafts::Part> MtpDrafts::fill(const Advance& s) {
  const int end = s.first + s.n;
  int first = s.first;
  const auto filled = [&](int position) -> uint8_t& {
    return n_filled_[s.replica][s.pages[position / kPageSize]];
  };
  while (first < end && filled(first) != first % kPageSize)
    first = (first / kPageSize + 1) * kPageSize;
  if (first >= end) return {};
  const Part part = {&s, first, end, first_page_of(s, first / kPageSize)};
  for (int page = first / kPageSize; page <= (end - 1) / kPageSize; ++page)
    filled(page * kPageSize) = static_cast<uint8_t>(std::min(end - page * kPageSize, kPageSize));
  return part;
}

// The first of the filled pages that end before `page`.
int MtpDrafts::first_page_of(const Advance& s, int page) const {
  while (page > 0 && n_filled_[s.replica][s.pages[page - 1]] == kPageSize) --page;
  return page;
}

// Fills the rows of all parts, and drafts a token for those that want one. A layer behind the first
// takes drafts where the text ends, or the last token if nothing was drafted.
void MtpDrafts::run_layer(int module) {
  clear_steps();
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
      steps_[s.replica].add_hidden_row(s.row + i - s.first);
    }
    const bool drafts = module < s.n_drafts && std::ssize(drafts_[s.id].tokens) == module;
    steps_[s.replica].add_window({.tokens = text,
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
  clear_steps();
  std::vector<const Part*> goes_on;
  std::vector<int> row(steps_.size());  // of the last logits of each replica
  for (const Part* drafted : drafted_) {
    const Part& part = *drafted;
    const Advance& s = *part.of;
    const int logits_row = row[s.replica]++;
    const std::vector<int32_t>& drafts = drafts_[s.id].tokens;
    const int position = part.end - n_modules_ + static_cast<int>(drafts.size());
    if (drafts.empty() || std::ssize(drafts) >= s.n_drafts ||
        position / kPageSize >= std::ssize(s.pages))
      continue;
    goes_on.push_back(&part);
    steps_[s.replica].add_hidden_row(logits_row);
    steps_[s.replica].add_window({.tokens = std::span(&drafts.back(), 1),
                                  .pages = s.pages.subspan(part.first_page),
                                  .first = position,
                                  .first_page = part.first_page,
                                  .n_logits = 1});
  }
  drafted_ = std::move(goes_on);
  if (!drafted_.empty()) compute(n_modules_ - 1, HiddenStates::kOfLogits);
}

void MtpDrafts::clear_steps() {
  for (StepArrays& step : steps_) step.clear();
}

void MtpDrafts::compute(int module, HiddenStates states) {
  std::vector<Batch> batches;
  for (const StepArrays& step : steps_) batches.push_back(step.batch());
  model_.draft(module, states, batches, cache_);
  take_drafts();
}

// Drafts the most likely token of each row of logits, none if they are not finite.
void MtpDrafts::take_drafts() {
  if (!model_.draws()) drafted_.clear();
  if (drafted_.empty()) return;
  std::vector<std::vector<Draw>> draws(steps_.size());
  for (const Part* part : drafted_) {
    std::vector<Draw>& of_replica = draws[part->of->replica];
    of_replica.push_back({static_cast<int32_t>(of_replica.size()), 0, 1, 0, 0, 0});
  }
  std::vector<LogitsWanted> wanted;
  for (const std::vector<Draw>& of_replica : draws) wanted.push_back({{}, of_replica});
  std::vector<int32_t> tokens(drafted_.size());
  model_.read_logits(wanted, tokens, {});
  for (size_t i = 0; i < tokens.size(); ++i) {
    const Advance& s = *drafted_[i]->of;
    Drafts& drafts = drafts_[s.id];
    drafts.position = static_cast<int>(s.tokens.size());
    if (tokens[i] >= 0) drafts.tokens.push_back(tokens[i]);
  }
}

}  // namespace tandem
