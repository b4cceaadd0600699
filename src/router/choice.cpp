#include "router/choice.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/check.h"

namespace tandem {

size_t best_candidate(std::span<const Candidate> candidates, double seconds_per_byte) {
  check(!candidates.empty(), "there is a candidate");
  double fastest = std::numeric_limits<double>::infinity();
  for (const Candidate& c : candidates)
    fastest = std::min(fastest, c.answer_seconds.value_or(fastest));
  if (fastest == std::numeric_limits<double>::infinity()) fastest = kUnknownSeconds;
  const auto cost = [&](const Candidate& c) {
    const double seconds =
        c.answer_seconds.value_or(fastest) * (1 + static_cast<double>(c.n_running)) -
        static_cast<double>(c.known_bytes) * seconds_per_byte;
    return std::pair(seconds, c.last_chosen);
  };
  const auto best =
      std::min_element(candidates.begin(), candidates.end(),
                       [&](const Candidate& a, const Candidate& b) { return cost(a) < cost(b); });
  return static_cast<size_t>(best - candidates.begin());
}

}  // namespace tandem
