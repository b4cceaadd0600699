#include "engine/host_pages.h"

#include <algorithm>
#include <chrono>
#include <vector>

namespace tandem {

HostPages::HostPages(Ops& ops, const KvCache& cache, int n_pages)
    : ops_(ops),
      cache_(cache),
      n_pages_(n_pages),
      layer_bytes_(static_cast<int64_t>(cache.page(0, 0).size())) {
  rates_.page_bytes = cache.n_layers() * layer_bytes_;
  memory_ = ops.allocate_on_host(n_pages * rates_.page_bytes);

  constexpr int kMeasured = 16;  // 72 MB of R1's
  const int n = std::min({kMeasured, n_pages, cache.n_free_pages()});
  const double bytes = static_cast<double>(n) * static_cast<double>(rates_.page_bytes);
  seconds_to_copy(n, true);  // the first time is slower
  rates_.to_host_bytes_per_second = bytes / seconds_to_copy(n, true);
  rates_.to_card_bytes_per_second = bytes / seconds_to_copy(n, false);
}

void HostPages::copy(std::span<const PageCopy> copies) {
  for (const PageCopy& c : copies) {
    std::byte* host = memory_.data() + c.host_page * rates_.page_bytes;
    for (int layer = 0; layer < cache_.n_layers(); ++layer, host += layer_bytes_) {
      std::byte* const card = cache_.page(layer, c.page).data();
      c.to_host ? ops_.copy(card, layer_bytes_, host) : ops_.copy(host, layer_bytes_, card);
    }
  }
}

// Of the first pages, which come back as they went.
double HostPages::seconds_to_copy(int n_pages, bool to_host) {
  std::vector<PageCopy> copies;
  copies.reserve(n_pages);
  for (int page = 0; page < n_pages; ++page) copies.push_back({page, page, to_host});
  ops_.wait();
  const auto start = std::chrono::steady_clock::now();
  copy(copies);
  ops_.wait();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace tandem
