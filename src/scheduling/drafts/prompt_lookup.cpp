#include "scheduling/drafts/prompt_lookup.h"

#include <algorithm>

namespace tandem {
namespace {

uint64_t hash_of(std::span<const int32_t> tokens) {
  uint64_t hash = 0;
  for (const int32_t token : tokens)
    hash = (hash ^ static_cast<uint64_t>(token + 1)) * 0x9e3779b97f4a7c15;
  return hash;
}

// The number of equal tokens that end at positions a and b.
int common(std::span<const int32_t> tokens, int32_t a, int32_t b) {
  int n = 0;
  while (n <= a && tokens[a - n] == tokens[b - n]) ++n;
  return n;
}

}  // namespace

// The last token is not indexed: its end would be found as its own occurrence.
void PromptLookup::index(std::span<const int32_t> tokens) {
  const auto n = static_cast<int32_t>(tokens.size());
  for (auto last = static_cast<int32_t>(earlier_.size()); last < n - 1; ++last) {
    earlier_.push_back(-1);
    if (last + 1 < kShortest) continue;
    const uint64_t hash = hash_of(tokens.subspan(last + 1 - kShortest, kShortest));
    const auto [at, is_new] = newest_.try_emplace(hash, last);
    if (is_new) continue;
    earlier_.back() = at->second;
    at->second = last;
  }
}

std::vector<int32_t> PromptLookup::draft(std::span<const int32_t> tokens, int n) {
  index(tokens);
  const auto end = static_cast<int32_t>(tokens.size()) - 1;
  if (n == 0 || end + 1 < kShortest) return {};
  const auto at = newest_.find(hash_of(tokens.last(kShortest)));
  if (at == newest_.end()) return {};
  int32_t best = -1;
  int longest = kShortest - 1;
  int left = kOccurrences;
  for (int32_t p = at->second; p >= 0 && left > 0; p = earlier_[p], --left)
    if (const int length = common(tokens, p, end); length > longest) {
      longest = length;
      best = p;
    }
  if (best < 0) return {};
  const auto next = tokens.begin() + best + 1;
  return {next, next + std::min(n, end - best)};
}

}  // namespace tandem
