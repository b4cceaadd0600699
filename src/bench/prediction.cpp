#include "bench/prediction.h"

#include <algorithm>
#include <numeric>

#include "core/machine_info.h"

namespace tandem {
namespace {

constexpr DeviceId kCpu{}, kGpu{0, 0};

Placement experts_on_cpu(const ModelConfig& config, WeightFormats formats, DeviceId backbone) {
  Placement p;
  p.backbone = formats.backbone;
  p.stages = {{0, config.n_layers - 1, {backbone}, 1}};
  std::vector<int> all(config.router.n_experts);
  std::iota(all.begin(), all.end(), 0);
  for (int l = 0; l < config.n_layers; ++l)
    if (config.is_moe(l)) p.layers.push_back({l, l, {{all, formats.experts, {kCpu}, false}}});
  return p;
}

}  // namespace

StepPrediction::StepPrediction(const ModelConfig& config, WeightFormats formats,
                               const Machine& machine)
    : config_(config),
      machine_(machine),
      placement_(experts_on_cpu(config, formats, machine.gpus.empty() ? kCpu : kGpu)) {}

double StepPrediction::decode_seconds(DecodeShape shape) const {
  const double tokens = shape.batch * (1.0 + shape.n_drafts);
  return step({tokens, double{1} * shape.context, false, 1, shape.n_drafts}).step_seconds;
}

double StepPrediction::prefill_seconds(int n, int step_tokens) const {
  double seconds = 0;
  for (int first = 0; first < n; first += step_tokens) {
    const int tokens = std::min(step_tokens, n - first);
    seconds += step({double{1} * tokens, first + double{1} * tokens, true, 1}).step_seconds;
  }
  return seconds;
}

double StepPrediction::shared_decode_seconds(int batch, int context) const {
  const Phase phase = step({double{1} * batch, double{1} * context, false, 1});
  return phase.step_seconds - phase.head_seconds;
}

double StepPrediction::streamed_seconds(int n) {
  placement_.stream_from_tokens = n;
  const Phase phase = step({double{1} * n, double{1} * n, true, 1});
  return phase.step_seconds - phase.head_seconds;
}

Phase StepPrediction::step(const StepShape& shape) const {
  Workload workload;
  workload.context = static_cast<int64_t>(shape.context);
  const RoutingStatistics uniform(config_);
  return predict_step({config_, machine_, workload, uniform}, placement_, shape);
}

void RatesProbe::burst(double seconds) {
  constexpr double kMaxMeasureSeconds = 0.05;
  constexpr int kKinds = 5;
  const double each = std::min(seconds, kMaxMeasureSeconds) / kKinds;
  const auto read = [&](Threads threads) {
    return speed_.read_bytes_per_second(speed_.best_read_loop(), threads, each);
  };
  const auto peak = [&](cpu::Arithmetic type) {
    const cpu::PeakLoop& loop = speed_.best_peak_loop(type, isa_);
    return loop.type == type ? speed_.ops_per_second(loop, Threads::kAll, each) : 0;
  };
  bursts_.push_back({read(Threads::kAll),
                     read(Threads::kOne),
                     {.fp32 = peak(cpu::Arithmetic::kF32),
                      .bf16 = peak(cpu::Arithmetic::kBF16),
                      .int8 = peak(cpu::Arithmetic::kInt8)}});
}

Machine RatesProbe::machine(int first, int end) const {
  const auto median_of = [&](auto rate) {
    std::vector<double> values;
    for (int i = first; i < end; ++i) values.push_back(rate(bursts_[i]));
    return median(std::move(values));
  };
  Machine machine;
  machine.isa = cpu::name_of(isa_);
  machine.curves = curves_;
  machine.nodes = {{speed_.team().size(), machine_info().memory_bytes,
                    median_of([](const Rates& r) { return r.read; })}};
  machine.one_thread_read_bytes_per_second =
      median_of([](const Rates& r) { return r.one_thread_read; });
  machine.peak = {.fp32 = median_of([](const Rates& r) { return r.peak.fp32; }),
                  .bf16 = median_of([](const Rates& r) { return r.peak.bf16; }),
                  .int8 = median_of([](const Rates& r) { return r.peak.int8; })};
  return machine;
}

}  // namespace tandem
