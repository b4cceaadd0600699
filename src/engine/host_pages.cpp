#include "engine/host_pages.h"

#include <algorithm>

#include "core/check.h"
#include "core/clock.h"

namespace tandem {

HostPages::HostPages(Device& device, const KvCache& cache, int n_pages)
    : device_(device), cache_(cache), n_pages_(n_pages) {
  rates_.page_bytes = cache.page_bytes();
  memory_ = device.allocate_on_host(n_pages * rates_.page_bytes);

  constexpr int kMeasured = 16;  // 72 MB of R1's cache
  const int n = std::min({kMeasured, n_pages, cache.n_pages()});
  const double bytes = static_cast<double>(n) * static_cast<double>(rates_.page_bytes);
  seconds_to_copy(n, true);  // the first copy is slower
  rates_.to_host_bytes_per_second = bytes / seconds_to_copy(n, true);
  rates_.to_gpu_bytes_per_second = bytes / seconds_to_copy(n, false);
}

void HostPages::copy(const PageCopy& c) {
  check(c.other >= 0 && c.other < n_pages_, "a page in host memory");
  std::byte* host = memory_.data() + c.other * rates_.page_bytes;
  cache_.for_each_piece(c.page, [&](std::span<std::byte> piece) {
    c.way == PageCopy::Way::kToHost ? device_.copy(piece.data(), std::ssize(piece), host)
                                    : device_.copy(host, std::ssize(piece), piece.data());
    host += piece.size();
  });
}

// Time to copy the first pages to the host or back, each to the same place.
double HostPages::seconds_to_copy(int n_pages, bool to_host) {
  const auto way = to_host ? PageCopy::Way::kToHost : PageCopy::Way::kFromHost;
  device_.wait();  // for earlier work, which is not measured
  return seconds_of([&] {
    for (int page = 0; page < n_pages; ++page) copy({page, page, way});
    device_.wait();
  });
}

}  // namespace tandem
