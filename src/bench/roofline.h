// The minimum time of a piece of work on this machine, from rates measured next to the work itself.
#pragma once
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <vector>

#include "bench/costs.h"
#include "bench/machine/machine_speed.h"

namespace tandem {

struct Work {
  Cost cost;
  std::function<void(int64_t run)> run;  // run 0, 1, ..: selects weights that are not cached
  std::vector<Cost> parts = {};          // consecutive parts of the cost; empty: a single one
};

// Median rates of the machine, measured between the runs.
struct Bounds {
  double read_bytes_per_second = 0, ops_per_second = 0;
  double instructions_per_second = 0;  // 0: not measured
  // The larger of bytes / bandwidth and ops / peak.
  double seconds(Cost cost) const;
  // The largest of bytes / bandwidth, ops / peak and counted instructions / instructions a second.
  double bound_seconds(Cost cost) const;
  // The sum of both: bytes / bandwidth + ops / peak.
  double unhidden_seconds(Cost cost) const;
};

struct Measured {
  double seconds = 0;  // median seconds of a run
  Cost cost;
  Bounds bounds;
  // The median over the runs, each compared with the bursts right before and after it: the speed of
  // a shared machine changes within seconds.
  double roofline_ratio = 0;
  double unhidden_ratio = 0;  // likewise, for unhidden_seconds()
  double bound_ratio = 0;     // likewise, for bound_seconds(); 0: instructions are not counted
  double roofline_seconds() const { return roofline_ratio * seconds; }
};

// Runs all works in turn, with bursts in between, until each has run for about `seconds` and at
// least three times. All turns take equally long, so that temporary load by other programs affects
// a part of each work's runs. Progress is reported after every turn: seconds of work done, and
// about how many there are in total.
using MeasuringProgress = std::function<void(double done, double of)>;
std::vector<Measured> measure(MachineSpeed& speed, const cpu::PeakLoop& peak,
                              std::span<const Work> works, double seconds,
                              const MeasuringProgress& progress = {});

// The instruction with which a table multiplies weights of a format.
const cpu::PeakLoop& peak_of_products(const MachineSpeed& speed, const cpu::KernelTable& kernels,
                                      DType format);
// The instruction with which a table computes attention.
const cpu::PeakLoop& peak_of_attention(const MachineSpeed& speed, const cpu::KernelTable& kernels);

// Seconds of the same work with a GPU; empty: no suitable GPU.
struct GpuSeconds {
  std::optional<double> with_copy;  // computed by the CPU, copied to the GPU
  std::optional<double> on_gpu;
};

// Adds seconds, those with a GPU (null without one), bytes, ops, roofline_seconds, both ratios and
// the rates that they are based on; with counted instructions also those, their rate, bound_seconds
// and bound_ratio.
void add_fields(nlohmann::ordered_json& row, const Measured& m, const cpu::PeakLoop& peak,
                GpuSeconds gpu = {});

}  // namespace tandem
