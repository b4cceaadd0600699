#include "offload/routing_recorder.h"

namespace tandem {

void RoutingCounter::add(int layer, const TensorView& ids) {
  std::vector<int64_t>& counts = counts_.of_layer[layer];
  std::vector<int32_t>& recent = recent_[layer];
  for (int64_t t = 0; t < ids.rows; ++t) {
    const auto* const chosen = ids.row<int32_t>(t);
    for (int64_t k = 0; k < ids.cols; ++k) ++counts[chosen[k]];
    if (std::ssize(recent) == (kMaxDraftTokens + 1) * ids.cols)
      recent.erase(recent.begin(), recent.begin() + ids.cols);
    recent.insert(recent.end(), chosen, chosen + ids.cols);
    count_windows(recent, ids.cols);
  }
}

// Counts the windows that end with the newest token.
void RoutingCounter::count_windows(std::span<const int32_t> recent, int64_t n_active) {
  ++n_windows_;
  int64_t n_different = 0;
  const int64_t n_tokens = std::ssize(recent) / n_active;
  for (int64_t n = 1; n <= n_tokens; ++n) {
    for (const int32_t e : recent.subspan((n_tokens - n) * n_active, n_active)) {
      if (std::ssize(seen_by_) <= e) seen_by_.resize(e + 1);
      n_different += seen_by_[e] != n_windows_;
      seen_by_[e] = n_windows_;
    }
    ++counts_.neighbours[n - 1].n;
    counts_.neighbours[n - 1].experts += n_different;
  }
}

}  // namespace tandem
