#include "bench/roofline.h"

#include <algorithm>

#include "io/json.h"
#include "ops/cpu_weights.h"

namespace tandem {
namespace {

constexpr int kRounds = 3;
constexpr double kShortestTiming = 1e-3;  // per group of runs that are timed together
constexpr double kMaxBurstSeconds = 0.1;

}  // namespace

double Bounds::seconds(Cost cost) const {
  return std::max(static_cast<double>(cost.bytes) / read_bytes_per_second,
                  static_cast<double>(cost.ops) / ops_per_second);
}

double Bounds::bound_seconds(Cost cost) const {
  const double starting =
      cost.instructions > 0 ? static_cast<double>(cost.instructions) / instructions_per_second : 0;
  return std::max(seconds(cost), starting);
}

double Bounds::unhidden_seconds(Cost cost) const {
  return static_cast<double>(cost.bytes) / read_bytes_per_second +
         static_cast<double>(cost.ops) / ops_per_second;
}

namespace {

// Bursts of reading, and of the instruction of the measured products.
class RooflineProbe {
 public:
  RooflineProbe(MachineSpeed& speed, const cpu::PeakLoop& peak, bool counts_instructions)
      : speed_(speed), peak_(peak), counts_instructions_(counts_instructions) {}
  // Takes as long as the work that it is compared with, `seconds`, within limits.
  void burst(double seconds) {
    const double each = std::min(seconds, kMaxBurstSeconds) / (counts_instructions_ ? 3 : 2);
    read_rates_.push_back(
        speed_.read_bytes_per_second(speed_.best_read_loop(), Threads::kAll, each));
    op_rates_.push_back(speed_.ops_per_second(peak_, Threads::kAll, each));
    start_rates_.push_back(counts_instructions_ ? speed_.instructions_per_second(peak_, each) : 0);
  }
  Bounds bounds() const { return bounds_of_last(static_cast<int>(read_rates_.size())); }
  Bounds bounds_of_last(int n) const {
    const auto median_of = [&](const std::vector<double>& rates) {
      return median({rates.end() - n, rates.end()});
    };
    return {median_of(read_rates_), median_of(op_rates_), median_of(start_rates_)};
  }

 private:
  MachineSpeed& speed_;
  const cpu::PeakLoop peak_;
  const bool counts_instructions_;
  std::vector<double> read_rates_, op_rates_, start_rates_;
};

}  // namespace

std::vector<Measured> measure(MachineSpeed& speed, const cpu::PeakLoop& peak,
                              std::span<const Work> works, double seconds,
                              const MeasuringProgress& progress) {
  struct Timings {
    std::vector<double> seconds, ratios, unhidden, bound;
    int64_t n_runs = 0, repeats = 1;
  };
  const auto roofline = [](const Work& work, const Bounds& bounds) {
    if (work.parts.empty()) return bounds.seconds(work.cost);
    double sum = 0;
    for (const Cost& part : work.parts) sum += bounds.seconds(part);
    return sum;
  };
  const bool counts_instructions = std::any_of(
      works.begin(), works.end(), [](const Work& w) { return w.cost.instructions > 0; });
  RooflineProbe probe(speed, peak, counts_instructions);
  std::vector<Timings> timings(works.size());
  const auto time_runs = [&](size_t w) {
    Timings& t = timings[w];
    const double time = seconds_of([&] {
      for (int64_t i = 0; i < t.repeats; ++i) works[w].run(t.n_runs++);
    });
    probe.burst(time);
    return time;
  };
  probe.burst(0);
  double spent = 0, expected = 0;
  for (size_t w = 0; w < works.size(); ++w) {
    const double time = time_runs(w);
    timings[w].repeats = std::max<int64_t>(1, static_cast<int64_t>(kShortestTiming / time));
    expected += std::max(kRounds * time, seconds);
  }
  for (int round = 0; round < kRounds; ++round) {
    for (size_t w = 0; w < works.size(); ++w) {
      double turn = 0;
      while (turn == 0 || turn < seconds / kRounds) {
        const double time = time_runs(w);
        turn += time;
        const Bounds beside = probe.bounds_of_last(2);
        Timings& t = timings[w];
        t.seconds.push_back(time / static_cast<double>(t.repeats));
        t.ratios.push_back(roofline(works[w], beside) / t.seconds.back());
        t.unhidden.push_back(beside.unhidden_seconds(works[w].cost) / t.seconds.back());
        t.bound.push_back(works[w].cost.instructions > 0
                              ? beside.bound_seconds(works[w].cost) / t.seconds.back()
                              : 0);
      }
      spent += turn;
      if (progress) progress(spent, std::max(spent, expected));
    }
  }
  if (progress) progress(spent, spent);
  std::vector<Measured> measured;
  for (size_t w = 0; w < works.size(); ++w)
    measured.push_back({median(timings[w].seconds), works[w].cost, probe.bounds(),
                        median(timings[w].ratios), median(timings[w].unhidden),
                        median(timings[w].bound)});
  return measured;
}

const cpu::PeakLoop& peak_of_products(const MachineSpeed& speed, const cpu::KernelTable& kernels,
                                      DType format) {
  switch (activation_for(kernels, format)) {
    case cpu::ActivationType::kF32:
      return speed.best_peak_loop(cpu::Arithmetic::kF32, kernels.isa);
    case cpu::ActivationType::kBF16:
      return speed.best_peak_loop(cpu::Arithmetic::kBF16, kernels.isa);
    case cpu::ActivationType::kU8:
      return speed.best_peak_loop(cpu::Arithmetic::kInt8, kernels.isa);
  }
  check(false, "a type of activations");
  return speed.best_peak_loop(cpu::Arithmetic::kF32, kernels.isa);
}

const cpu::PeakLoop& peak_of_attention(const MachineSpeed& speed, const cpu::KernelTable& kernels) {
  const bool bf16 = kernels.attention == cpu::ActivationType::kBF16;
  return speed.best_peak_loop(bf16 ? cpu::Arithmetic::kBF16 : cpu::Arithmetic::kF32, kernels.isa);
}

void add_fields(nlohmann::ordered_json& row, const Measured& m, const cpu::PeakLoop& peak,
                GpuSeconds gpu) {
  row["seconds"] = m.seconds;
  row["cpu_to_gpu_seconds"] = or_null(gpu.with_copy);
  row["gpu_seconds"] = or_null(gpu.on_gpu);
  row["bytes"] = m.cost.bytes;
  row["ops"] = m.cost.ops;
  row["roofline_seconds"] = m.roofline_seconds();
  row["roofline_ratio"] = m.roofline_ratio;
  row["unhidden_ratio"] = m.unhidden_ratio;
  row["bytes_per_second"] = static_cast<double>(m.cost.bytes) / m.seconds;
  row["ops_per_second"] = static_cast<double>(m.cost.ops) / m.seconds;
  row["read_bytes_per_second"] = m.bounds.read_bytes_per_second;
  row["peak_ops_per_second"] = m.bounds.ops_per_second;
  row["instruction"] = peak.instruction;
  if (m.cost.instructions == 0) return;
  row["instructions"] = m.cost.instructions;
  row["instructions_per_second"] = m.bounds.instructions_per_second;
  row["bound_seconds"] = m.bound_ratio * m.seconds;
  row["bound_ratio"] = m.bound_ratio;
}

}  // namespace tandem
