// Pages of host memory for sequences that give up theirs of a card's cache. Copies what the
// scheduler decides.
#pragma once
#include "engine/kv_cache.h"
#include "engine/swapping.h"
#include "ops/device.h"

namespace tandem {

class HostPages {
 public:
  // The references outlive the object. Reserves the memory of n_pages pages, which is more than
  // none, and measures the link by copying some. Before the first step; throws Error when too
  // little memory is left.
  HostPages(Device& device, const KvCache& cache, int n_pages);

  int n_pages() const { return n_pages_; }
  // All but the speed of computing.
  const SwapRates& rates() const { return rates_; }

  // Enqueues a copy to or from host memory before the steps that follow.
  void copy(const PageCopy& copy);

 private:
  double seconds_to_copy(int n_pages, bool to_host);

  Device& device_;
  const KvCache& cache_;
  const int n_pages_;
  SwapRates rates_;
  Buffer memory_;  // [n_pages], the pieces of each one after the other
};

}  // namespace tandem
