// Sequences that a test advances step by step, on cache pages in random order.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "core/check.h"
#include "engine/step_runner.h"

namespace tandem::test {

class Conversations {
 public:
  // n sequences that share all pages of the cache.
  Conversations(StepRunner& model, KvCache& cache, unsigned seed, int n)
      : model_(model), cache_(cache), sequences_(n) {
    for (int page = cache.n_pages() - 1; page >= 0; --page) pages_.push_back(page);
    std::shuffle(pages_.begin(), pages_.end(), std::mt19937(seed));
  }
  int vocab() const { return model_.config().vocab; }
  int length(int sequence) const { return sequences_[sequence].length; }

  const std::vector<int32_t>& pages(int sequence) const { return sequences_[sequence].pages; }

  void forget(int sequence) {
    Kept& s = sequences_[sequence];
    pages_.insert(pages_.begin(), s.pages.begin(), s.pages.end());
    s = {};
  }

  struct Part {
    int sequence;
    std::vector<int32_t> tokens;
  };
  // Runs one step and returns the logits of each part's last token.
  std::vector<std::vector<float>> step(const std::vector<Part>& parts) {
    const Arrays a = arrays_of(parts);
    return run(a, a.rows);
  }
  // Runs one step and returns the logits of all tokens, as verifying drafts needs them.
  std::vector<std::vector<float>> step_with_drafts(const std::vector<Part>& parts) {
    const Arrays a = arrays_of(parts);
    std::vector<int32_t> rows(a.tokens.size());
    std::iota(rows.begin(), rows.end(), 0);
    return run(a, rows);
  }
  // Runs one step without logits, so that a device may still compute after the call.
  void step_without_logits(const std::vector<Part>& parts) {
    const Arrays a = arrays_of(parts);
    model_.forward({a.tokens, a.positions, a.sequences, {}}, cache_);
  }

 private:
  struct Kept {
    int32_t length = 0;
    std::vector<int32_t> pages;
  };
  struct Arrays {
    std::vector<int32_t> tokens, positions, rows;
    std::vector<Sequence> sequences;
  };
  std::vector<std::vector<float>> run(const Arrays& a, const std::vector<int32_t>& rows) {
    std::vector<float> logits(rows.size() * vocab(), NAN);
    model_.forward({a.tokens, a.positions, a.sequences, rows}, cache_,
                   {logits.data(), std::ssize(rows), vocab(), vocab(), DType::kF32});
    std::vector<std::vector<float>> out;
    for (size_t r = 0; r < rows.size(); ++r)
      out.emplace_back(logits.begin() + r * vocab(), logits.begin() + (r + 1) * vocab());
    return out;
  }
  Arrays arrays_of(const std::vector<Part>& parts) {
    Arrays a;
    for (const Part& part : parts) {
      Kept& s = sequences_[part.sequence];
      const auto first = static_cast<int32_t>(a.tokens.size());
      for (const int32_t token : part.tokens) {
        a.tokens.push_back(token);
        a.positions.push_back(s.length++);
      }
      while (std::ssize(s.pages) < pages_for(s.length)) {
        require(!pages_.empty(), "the cache of this test has too few pages");
        s.pages.push_back(pages_.back());
        pages_.pop_back();
      }
      a.sequences.push_back({first, static_cast<int32_t>(part.tokens.size()), s.length, s.pages});
      a.rows.push_back(static_cast<int32_t>(a.tokens.size()) - 1);
    }
    return a;
  }

  StepRunner& model_;
  KvCache& cache_;
  std::vector<int32_t> pages_;  // free pages
  std::vector<Kept> sequences_;
};

}  // namespace tandem::test
