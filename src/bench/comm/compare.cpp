// How calls are timed that all ranks make together.
#include <algorithm>
#include <cmath>

#include "bench/comm/comm.h"
#include "bench/machine/machine_speed.h"
#include "core/clock.h"

namespace tandem {
namespace {

// Seconds of one of n invocations, of the rank that takes longest, which all ranks get.
double seconds_of_calls(Group& group, const std::function<void()>& call, int n) {
  group.barrier();
  const double mine = seconds_of([&] {
    for (int i = 0; i < n; ++i) call();
  });
  std::vector<double> all(group.size());
  group.all_gather_values(mine, std::span(all));
  return *std::max_element(all.begin(), all.end()) / n;
}

}  // namespace

// A measurement takes as many invocations as fill a thousandth of a second, or one.
ComparedSeconds compare(Group& group, const ComparedCalls& calls, double seconds) {
  constexpr double kMeasurement = 1e-3;
  constexpr int kLeast = 5, kMostCalls = 100;
  struct Side {
    const std::function<void()>& call;
    int n = 1;
    std::vector<double> seconds = {};
  };
  Side sides[] = {{calls.own}, {calls.raw}};
  for (Side& side : sides) {
    seconds_of_calls(group, side.call, 1);  // connections are opened, scratch memory grows
    const double once = std::max(seconds_of_calls(group, side.call, 2), 1e-9);
    side.n = static_cast<int>(std::clamp(std::ceil(kMeasurement / once), 1.0, 1.0 * kMostCalls));
  }
  std::vector<double> ratios;
  double spent = 0;
  while (std::ssize(ratios) < kLeast || spent < 2 * seconds) {
    for (Side& side : sides) {
      side.seconds.push_back(seconds_of_calls(group, side.call, side.n));
      spent += side.seconds.back() * side.n;
    }
    ratios.push_back(sides[0].seconds.back() / sides[1].seconds.back());
  }
  return {median(sides[0].seconds) / calls.n, median(sides[1].seconds) / calls.n, median(ratios)};
}

}  // namespace tandem
