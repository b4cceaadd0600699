// A sequence that gives up its pages of a card can have them kept in host memory or be computed
// again. Which is cheaper, and how many pages host memory has for it: functions of numbers.
#pragma once
#include <cstdint>

namespace tandem {

// A page of the cache goes to a page of host memory, comes from one, or begins as another page of
// the cache.
struct PageCopy {
  enum class Way { kToHost, kFromHost, kWithin };
  int32_t page, other;
  Way way;
};

// As measured; 0: unknown.
struct SwapRates {
  int64_t page_bytes = 0;  // in all layers
  double to_host_bytes_per_second = 0, to_gpu_bytes_per_second = 0;
  double computed_tokens_per_second = 0;
};

// Whether n_pages take less time to host memory and back than n_tokens to be computed again. Never
// while the link's rates are unknown.
bool swapping_pays(int n_pages, int n_tokens, const SwapRates& rates);

struct HostPagesArgs {
  int gpu_pages;         // of the cache
  int64_t most_pages;    // that all sequences together may ever fill
  int64_t page_bytes;    // in all layers
  int64_t memory_bytes;  // of the host, free beside all others
};

// Pages of host memory for sequences that gave up theirs: for those that a card cannot hold, at
// most four times the card's, and at most a quarter of the memory. When n sequences grow alike and
// give way one after the other, they leave 1/n + .. + 1/2 of the card's pages: four times is
// enough for 80.
int host_pages_for(const HostPagesArgs& args);

// How fast tokens are computed: the fastest that steps have done it, so that a sequence is not
// swapped because of a slow one.
class ComputingSpeed {
 public:
  // A step. A device may be behind until a step's results are waited for.
  void add(int n_tokens, double seconds, bool waited);
  double tokens_per_second() const { return best_; }

 private:
  int64_t n_tokens_ = 0;  // since a step that was waited for
  double seconds_ = 0, best_ = 0;
};

}  // namespace tandem
