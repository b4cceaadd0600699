// Pages of host memory for preempted sequences. Copies what the scheduler decides.
#pragma once
#include "ops/device.h"
#include "scheduling/kv_cache.h"
#include "scheduling/swapping.h"

namespace tandem {

class HostPages {
 public:
  // The references outlive the object. Allocates n_pages pages, at least one, and measures the link
  // by copying some, so it must be created before the first step. Throws Error when too little
  // memory is left.
  HostPages(Device& device, const KvCache& cache, int n_pages);

  int n_pages() const { return n_pages_; }
  // Everything except the speed of computing, which is 0.
  const SwapRates& rates() const { return rates_; }

  // Enqueues a copy to or from host memory; later steps see its result.
  void copy(const PageCopy& copy);

 private:
  double seconds_to_copy(int n_pages, bool to_host);

  Device& device_;
  const KvCache& cache_;
  const int n_pages_;
  SwapRates rates_;
  Buffer memory_;  // [n_pages], each with its pieces in a row
};

}  // namespace tandem
