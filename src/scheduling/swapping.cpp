#include "scheduling/swapping.h"

#include <algorithm>

namespace tandem {

// At an unknown rate, 0, a copy takes infinitely long, which never pays.
bool swapping_pays(int n_pages, int n_tokens, const SwapRates& r) {
  const double bytes = static_cast<double>(n_pages) * static_cast<double>(r.page_bytes);
  const double seconds = bytes / r.to_host_bytes_per_second + bytes / r.to_gpu_bytes_per_second;
  return seconds * r.computed_tokens_per_second < n_tokens;
}

int host_pages_for(const HostPagesArgs& a) {
  const int64_t left_over = a.most_pages - a.gpu_pages;
  const int64_t fitting = a.memory_bytes / 4 / a.page_bytes;
  return static_cast<int>(
      std::max<int64_t>(0, std::min({left_over, int64_t{4} * a.gpu_pages, fitting})));
}

void ComputingSpeed::add(int n_tokens, double seconds, bool waited) {
  n_tokens_ += n_tokens;
  seconds_ += seconds;
  if (!waited) return;
  if (seconds_ > 0) best_ = std::max(best_, static_cast<double>(n_tokens_) / seconds_);
  n_tokens_ = 0;
  seconds_ = 0;
}

}  // namespace tandem
