#include "bench/prediction.h"

#include <algorithm>
#include <numeric>

#include "bench/machine_info.h"

namespace tandem {
namespace {

constexpr Device kCpu{};
constexpr double kPeakSeconds = 0.02;

Placement all_on_cpu(const ModelConfig& config, WeightFormats formats) {
  Placement p;
  p.backbone = formats.backbone;
  p.stages = {{0, config.n_layers - 1, {kCpu}, 1}};
  std::vector<int> all(config.router.n_experts);
  std::iota(all.begin(), all.end(), 0);
  for (int l = 0; l < config.n_layers; ++l)
    if (config.is_moe(l)) p.layers.push_back({l, l, {{all, formats.experts, {kCpu}, false}}});
  return p;
}

}  // namespace

CpuPrediction::CpuPrediction(const ModelConfig& config, WeightFormats formats,
                             const Machine& machine)
    : config_(config), machine_(machine), placement_(all_on_cpu(config, formats)) {}

double CpuPrediction::decode_seconds(int batch, int context) const {
  return step_seconds(batch, context, false);
}

double CpuPrediction::prefill_seconds(int n, int step_tokens) const {
  double seconds = 0;
  for (int first = 0; first < n; first += step_tokens) {
    const int tokens = std::min(step_tokens, n - first);
    seconds += step_seconds(tokens, first + tokens, true);
  }
  return seconds;
}

double CpuPrediction::step_seconds(double tokens, double context, bool prefill) const {
  Workload workload;
  workload.context = static_cast<int64_t>(context);
  const RoutingStatistics uniform(config_);
  return predict_step({config_, machine_, workload, uniform}, placement_,
                      {tokens, context, prefill, 1})
      .step_seconds;
}

Machine machine_of(MachineSpeed& speed, cpu::Isa isa, double read_bytes_per_second) {
  const auto peak = [&](cpu::Arithmetic type) {
    const cpu::PeakLoop& loop = speed.best_peak_loop(type, isa);
    return loop.type == type ? speed.ops_per_second(loop, Threads::kAll, kPeakSeconds) : 0;
  };
  Machine machine;
  machine.isa = cpu::name_of(isa);
  machine.nodes = {{speed.team().size(), machine_info().memory_bytes, read_bytes_per_second}};
  machine.one_thread_read_bytes_per_second =
      speed.read_bytes_per_second(speed.best_read_loop(), Threads::kOne);
  machine.peak = {.fp32 = peak(cpu::Arithmetic::kF32),
                  .bf16 = peak(cpu::Arithmetic::kBF16),
                  .int8 = peak(cpu::Arithmetic::kInt8)};
  return machine;
}

}  // namespace tandem
