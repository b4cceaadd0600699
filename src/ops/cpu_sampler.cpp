#include "ops/cpu_sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tandem {
namespace {

constexpr float kExcluded = -std::numeric_limits<float>::infinity();

}  // namespace

int32_t TokenDraw::operator()(std::span<const float> logits, const Draw& how) {
  const auto likeliest = std::max_element(logits.begin(), logits.end());
  if (how.temperature == 0) return static_cast<int32_t>(likeliest - logits.begin());
  candidates_.resize(std::max(candidates_.size(), logits.size()));
  size_t n = 0;
  for (size_t t = 0; t < logits.size(); ++t)
    if (logits[t] != kExcluded)
      candidates_[n++] = {static_cast<int32_t>(t),
                          std::exp((logits[t] - *likeliest) / how.temperature)};
  const auto begin = candidates_.begin();
  if (how.top_k > 0 && static_cast<size_t>(how.top_k) < n) {
    std::nth_element(begin, begin + (how.top_k - 1), begin + static_cast<int64_t>(n),
                     [](const Candidate& a, const Candidate& b) {
                       return is_more_likely(a.value, a.token, b.value, b.token);
                     });
    n = static_cast<size_t>(how.top_k);
  }
  if (how.top_p < 1) n = keep_top_p(n, how.top_p);
  const auto end_of = [&] { return begin + static_cast<int64_t>(n); };
  if (how.min_p > 0)
    n = static_cast<size_t>(
        std::partition(begin, end_of(), [&](const Candidate& c) { return c.value >= how.min_p; }) -
        begin);

  double sum = 0;
  const auto by_token = [](const Candidate& a, const Candidate& b) { return a.token < b.token; };
  // Sorting 130,000 candidates takes milliseconds, also if they are in order.
  if (!std::is_sorted(begin, end_of(), by_token)) std::sort(begin, end_of(), by_token);
  for (size_t i = 0; i < n; ++i) sum += candidates_[i].value;
  double left = how.uniform * sum;
  for (size_t i = 0; i < n; ++i)
    if ((left -= candidates_[i].value) < 0) return candidates_[i].token;
  return candidates_[n - 1].token;
}

// Moves the most likely candidates that together reach top_p of the first n to the front, and
// returns their number. Sorts no more than it must.
size_t TokenDraw::keep_top_p(size_t n, float top_p) {
  double total = 0;
  for (size_t i = 0; i < n; ++i) total += candidates_[i].value;
  const auto begin = candidates_.begin();
  double sum = 0;
  for (size_t sorted = 0, block = 64; sorted < n; block *= 4) {
    const size_t end = std::min(n, sorted + block);
    std::partial_sort(begin + static_cast<int64_t>(sorted), begin + static_cast<int64_t>(end),
                      begin + static_cast<int64_t>(n), [](const Candidate& a, const Candidate& b) {
                        return is_more_likely(a.value, a.token, b.value, b.token);
                      });
    for (; sorted < end; ++sorted)
      if ((sum += candidates_[sorted].value) >= top_p * total) return sorted + 1;
  }
  return n;
}

CpuSampler::CpuSampler(std::span<const uint32_t> allowed, int n_tokens, Team& team)
    : n_tokens_(n_tokens), team_(team), draws_(team.size()) {
  for (int32_t token = 0; token < n_tokens; ++token)
    if ((allowed[token / 32] >> token % 32 & 1) == 0) excluded_.push_back(token);
}

void CpuSampler::draw(TensorView logits, std::span<const Draw> how, std::span<int32_t> tokens) {
  team_.run(std::ssize(how), [&](int64_t i, int thread) {
    const std::span<float> row(logits.row<float>(how[i].row), static_cast<size_t>(n_tokens_));
    tokens[i] = -1;
    if (!std::all_of(row.begin(), row.end(), [](float v) { return std::isfinite(v); })) return;
    for (const int32_t token : excluded_) row[token] = kExcluded;
    tokens[i] = draws_[thread](row, how[i]);
  });
}

}  // namespace tandem
