#include "offload/expert_division.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>

namespace tandem {

void divide_experts(std::span<const int> rows, std::span<const int> ahead, const ExpertRates& rates,
                    Division& out) {
  std::vector<int>& order = out.order;
  order.resize(rows.size());
  std::iota(order.begin(), order.end(), 0);
  auto rest = order.begin();
  for (const int expert : ahead) std::iter_swap(rest++, std::find(rest, order.end(), expert));
  std::sort(rest, order.end(),
            [&](int a, int b) { return rows[a] != rows[b] ? rows[a] > rows[b] : a < b; });

  double link = 0, gpu = 0, cpu = 0;
  for (const int expert : ahead) gpu += rates.gpu.at(rows[expert]);
  for (auto e = rest; e != order.end(); ++e) cpu += rates.cpu.at(rows[*e]);
  double least = std::numeric_limits<double>::infinity();
  for (auto e = rest;; ++e) {
    const double seconds = std::max({link, gpu, cpu});
    if (seconds < least) {
      least = seconds;
      out.n_on_gpu = static_cast<int>(e - order.begin());
    }
    if (e == order.end()) return;
    link += rates.link_seconds;
    gpu += rates.gpu.at(rows[*e]);
    cpu += rates.copy_seconds - rates.cpu.at(rows[*e]);
  }
}

double SecondsByRows::at(int n) const {
  if (n == 0) return 0;
  const auto after =
      std::find_if(points.begin(), points.end(), [&](const Point& p) { return p.rows >= n; });
  if (after == points.begin()) return after->seconds;
  const Point& before = *std::prev(after);
  if (after == points.end()) return before.seconds * n / before.rows;
  const double share = static_cast<double>(n - before.rows) / (after->rows - before.rows);
  return before.seconds + share * (after->seconds - before.seconds);
}

}  // namespace tandem
