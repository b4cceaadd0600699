#include "bench/gpu/gpu_benches.h"
#include "bench/gpu_bench_model.h"
#include "bench/machine/machine_speed.h"
#include "gpu_kernels/peaks.h"
#include "gpu_kernels/runtime.h"

namespace tandem {

double gap_between(TimedKernels shorter, TimedKernels longer) {
  const double a_cycle = (longer.seconds - shorter.seconds) / (longer.cycles - shorter.cycles);
  return shorter.seconds - a_cycle * shorter.cycles;
}

std::optional<double> measured_kernel_gap(double seconds) {
  constexpr int kKernels = 64, kTurns = 5;
  constexpr int64_t kShort = 4'000, kLong = 20'000;  // cycles: 2 and 10 us at 2 GHz
  gpu::open_gpu();
  gpu::Stream stream;
  const auto recorded = [&](int64_t cycles) {
    return stream.capture([&] {
      for (int i = 0; i < kKernels; ++i) gpu::idle_cycles(stream, cycles);
    });
  };
  const gpu::Graph with_short = recorded(kShort), with_long = recorded(kLong);
  const auto timed = [&](const gpu::Graph& graph, int64_t cycles) {
    const double of_graph = seconds_of_runs([&](int64_t) { stream.replay(graph); },
                                            [&] { stream.wait(); }, seconds / (2 * kTurns));
    return TimedKernels{static_cast<double>(cycles), of_graph / kKernels};
  };
  std::vector<double> gaps;  // in turns, since the GPU's clock may change
  for (int turn = 0; turn < kTurns; ++turn)
    gaps.push_back(gap_between(timed(with_short, kShort), timed(with_long, kLong)));
  const double gap = median(gaps);
  return gap > 0 ? std::optional(gap) : std::nullopt;
}

}  // namespace tandem
