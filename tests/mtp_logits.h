// Logits of layers for multi-token prediction, as the engine computes them, and what the golden
// files have (tests/golden/README.md).
#pragma once
#include <gtest/gtest.h>

#include <algorithm>

#include "loader/loaded_model.h"
#include "tests/check_close.h"
#include "tests/golden_file.h"

namespace tandem::test {

// Pages in an order that is not that of memory.
inline std::vector<int32_t> scattered_pages(const KvCache& cache) {
  std::vector<int32_t> pages(cache.n_pages());
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<int32_t>(pages.size() - 1 - i);
  return pages;
}

struct Rows {
  int64_t n, cols;
  std::vector<float> numbers;
  std::span<const float> row(int64_t i) const { return std::span(numbers).subspan(i * cols, cols); }
};

inline Rows logits_of(LoadedModel& loaded, int64_t n) {
  const int64_t vocab = loaded.config().vocab;
  Rows rows = {n, vocab, std::vector<float>(n * vocab)};
  loaded.model().device().to_host(loaded.model().logits().rows_from(0, n),
                                  {rows.numbers.data(), n, vocab, vocab, DType::kF32});
  return rows;
}

// The logits of layer 0 for multi-token prediction after each of `tokens`, in pieces of `chunk`
// tokens; next[i] follows tokens[i].
inline std::vector<std::vector<float>> mtp_logits(LoadedModel& loaded,
                                                  const std::vector<int32_t>& tokens,
                                                  const std::vector<int32_t>& next, int chunk) {
  const std::vector<int32_t> pages = scattered_pages(loaded.cache());
  std::vector<std::vector<float>> logits;
  const auto n = static_cast<int>(tokens.size());
  for (int first = 0; first < n; first += chunk) {
    const int count = std::min(chunk, n - first);
    StepArrays step(count);
    step.add(tokens, pages, first, count, 1);
    loaded.model().forward(step.batch(), loaded.cache());
    step.clear();
    step.add(next, pages, first, count, count);
    for (int i = 0; i < count; ++i) step.add_hidden_row(i);
    loaded.model().draft(0, HiddenStates::kOfModel, step.batch(), loaded.cache());
    const Rows got = logits_of(loaded, count);
    for (int64_t i = 0; i < count; ++i) {
      const auto row = got.row(i);
      logits.emplace_back(row.begin(), row.end());
    }
  }
  return logits;
}

inline int32_t best_of(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// The logits after `draft`, which mtp_logits() drafted after n tokens.
inline std::vector<float> applied_again(LoadedModel& loaded, int n, int32_t draft, int chunk) {
  const std::vector<int32_t> pages = scattered_pages(loaded.cache());
  StepArrays step(1);
  step.add_window({std::span(&draft, 1), pages, n, 0, 1});
  step.add_hidden_row((n - 1) % chunk);
  loaded.model().draft(0, HiddenStates::kOfLogits, step.batch(), loaded.cache());
  return logits_of(loaded, 1).numbers;
}

// Compares all rows that the golden file has, and the layer applied once more. Returns their
// number.
inline int compare_with_golden(LoadedModel& loaded, const GoldenFile& golden, int chunk,
                               double tolerance) {
  const size_t vocab = loaded.config().vocab;
  int n_compared = 0;
  for (const int length : {5, 17, 150, 200}) {
    const std::string suffix = "_" + std::to_string(length);
    if (!golden.has("mtp_logits" + suffix)) continue;
    const std::vector<int32_t> tokens = golden.ints("mtp_tokens" + suffix);
    const auto logits = mtp_logits(loaded, tokens, golden.ints("mtp_next_tokens" + suffix), chunk);
    const std::vector<float> want = golden.floats("mtp_logits" + suffix);
    const size_t n_rows = want.size() / vocab;
    for (size_t i = 0; i < n_rows; ++i) {
      SCOPED_TRACE(testing::Message() << length << " tokens, row " << i << " of " << n_rows);
      const std::span<const float> row(want.data() + i * vocab, vocab);
      expect_close(logits[length - n_rows + i], row, tolerance * largest(row));
      ++n_compared;
    }
    SCOPED_TRACE(testing::Message() << length << " tokens, the layer applied again");
    const std::vector<float> second = golden.floats("mtp_second_logits" + suffix);
    expect_close(applied_again(loaded, length, best_of(logits.back()), chunk), second,
                 tolerance * largest(second));
  }
  return n_compared;
}

}  // namespace tandem::test
