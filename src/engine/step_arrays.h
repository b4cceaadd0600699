// The arrays that a step's Batch refers to.
#pragma once
#include <span>
#include <vector>

#include "model/batch.h"

namespace tandem {

class StepArrays {
 public:
  explicit StepArrays(int max_tokens) {
    for (auto* v : {&tokens_, &positions_, &logit_rows_}) v->reserve(max_tokens);
    sequences_.reserve(max_tokens);
  }

  void clear() {
    for (auto* v : {&tokens_, &positions_, &logit_rows_}) v->clear();
    sequences_.clear();
  }

  // Adds tokens [first, first + n) of a sequence, the last n_logits of them with logits; `pages`
  // holds them and all tokens before, and outlives the step.
  void add(std::span<const int32_t> tokens, std::span<const int32_t> pages, int first, int n,
           int n_logits) {
    const int begin = n_tokens();
    for (int i = first; i < first + n; ++i) {
      tokens_.push_back(tokens[i]);
      positions_.push_back(i);
    }
    sequences_.push_back({begin, n, first + n, pages});
    for (int i = n - n_logits; i < n; ++i) logit_rows_.push_back(begin + i);
  }

  int n_tokens() const { return static_cast<int>(tokens_.size()); }
  int n_logits() const { return static_cast<int>(logit_rows_.size()); }
  Batch batch() const { return {tokens_, positions_, sequences_, logit_rows_}; }

 private:
  std::vector<int32_t> tokens_, positions_, logit_rows_;
  std::vector<Sequence> sequences_;
};

}  // namespace tandem
