// A preempted sequence can have its pages copied to host memory, or be recomputed. Which is
// cheaper, and how many host pages there are, are pure functions.
#pragma once
#include <cstdint>

namespace tandem {

// A copy of a page of the cache to a page of host memory, from one, or from another page of the
// cache.
struct PageCopy {
  enum class Way : int32_t { kToHost, kFromHost, kWithin };
  int32_t page = 0, other = 0;
  Way way = Way::kWithin;
};

// Measured rates; 0: unknown.
struct SwapRates {
  int64_t page_bytes = 0;  // in all layers
  double to_host_bytes_per_second = 0, to_gpu_bytes_per_second = 0;
  double computed_tokens_per_second = 0;
};

// Whether copying n_pages to host memory and back takes less time than recomputing n_tokens. False
// while the link's rates are unknown.
bool swapping_pays(int n_pages, int n_tokens, const SwapRates& rates);

struct HostPagesArgs {
  int gpu_pages;         // pages of the cache
  int64_t most_pages;    // upper bound of the pages of all sequences together
  int64_t page_bytes;    // in all layers
  int64_t memory_bytes;  // host memory that is not used otherwise
};

// Number of host pages for preempted sequences: those that the GPU cannot hold, at most four times
// the GPU's, and at most a quarter of the memory. When n sequences grow equally and are preempted
// one after the other, they leave 1/n + .. + 1/2 of the GPU's pages: four times is enough for 80.
int host_pages_for(const HostPagesArgs& args);

// Measures how fast tokens are computed: the maximum over the steps, so that a single slow step
// does not cause swapping.
class ComputingSpeed {
 public:
  // Adds a step. A device may be behind the host until a step's results are waited for.
  void add(int n_tokens, double seconds, bool waited);
  double tokens_per_second() const { return best_; }

 private:
  int64_t n_tokens_ = 0;  // tokens since the last step that was waited for
  double seconds_ = 0, best_ = 0;
};

}  // namespace tandem
