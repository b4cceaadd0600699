// The arrays that a step's Batch refers to.
#pragma once
#include <span>
#include <vector>

#include "model/batch.h"
#include "model/kv_layout.h"

namespace tandem {

class StepArrays {
 public:
  explicit StepArrays(int max_tokens) {
    for (auto* v : {&tokens_, &positions_, &logit_rows_, &hidden_rows_}) v->reserve(max_tokens);
    sequences_.reserve(max_tokens);
  }

  void clear() {
    for (auto* v : {&tokens_, &positions_, &logit_rows_, &hidden_rows_}) v->clear();
    sequences_.clear();
  }

  // Adds tokens [first, first + n) of a sequence, the last n_logits of them with logits; `pages`
  // holds them and all tokens before, and outlives the step.
  void add(std::span<const int32_t> tokens, std::span<const int32_t> pages, int first, int n,
           int n_logits) {
    add_window({tokens.subspan(first, n), pages, first, 0, n_logits});
  }

  // Adds tokens at positions `first` on, of a sequence whose cache begins with page first_page of
  // its positions. Spans of pages outlive the step.
  struct Window {
    std::span<const int32_t> tokens, pages;
    int first, first_page, n_logits;
  };
  void add_window(const Window& w) {
    const int begin = n_tokens(), n = static_cast<int>(w.tokens.size());
    tokens_.insert(tokens_.end(), w.tokens.begin(), w.tokens.end());
    for (int i = 0; i < n; ++i) positions_.push_back(w.first + i);
    sequences_.push_back({begin, n, w.first + n - w.first_page * kPageSize, w.pages});
    for (int i = n - w.n_logits; i < n; ++i) logit_rows_.push_back(begin + i);
  }

  // Becomes a copy of a step, also of its lists of pages.
  void copy(const Batch& step) {
    tokens_.assign(step.tokens.begin(), step.tokens.end());
    positions_.assign(step.positions.begin(), step.positions.end());
    logit_rows_.assign(step.logit_rows.begin(), step.logit_rows.end());
    hidden_rows_.assign(step.hidden_rows.begin(), step.hidden_rows.end());
    sequences_.assign(step.sequences.begin(), step.sequences.end());
    copied_pages_.clear();
    for (const Sequence& s : step.sequences)
      copied_pages_.insert(copied_pages_.end(), s.kv_pages.begin(), s.kv_pages.end());
    std::span<const int32_t> pages(copied_pages_);
    for (Sequence& s : sequences_) {
      s.kv_pages = pages.first(s.kv_pages.size());
      pages = pages.subspan(s.kv_pages.size());
    }
  }

  // Adds a row of Batch::hidden_rows.
  void add_hidden_row(int row) { hidden_rows_.push_back(row); }

  int n_tokens() const { return static_cast<int>(tokens_.size()); }
  int n_logits() const { return static_cast<int>(logit_rows_.size()); }
  Batch batch() const { return {tokens_, positions_, sequences_, logit_rows_, hidden_rows_}; }

 private:
  std::vector<int32_t> tokens_, positions_, logit_rows_, hidden_rows_, copied_pages_;
  std::vector<Sequence> sequences_;
};

}  // namespace tandem
