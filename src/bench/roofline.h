// How long a piece of work must take at least on this machine, measured beside the work itself.
#pragma once
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <vector>

#include "bench/machine_speed.h"

namespace tandem {

// What a run must do at least. A multiplication and an addition are two operations.
struct Cost {
  int64_t bytes = 0;  // read from memory
  int64_t ops = 0;
};

struct Work {
  Cost cost;
  std::function<void(int64_t run)>
      run;                       // run 0, 1, ..: to walk through weights that are not cached
  std::vector<Cost> parts = {};  // of the cost, that follow one another; none: it is one
};

// What the machine did beside it. Medians.
struct Bounds {
  double read_bytes_per_second = 0, ops_per_second = 0;
  // The larger of bytes / bandwidth and ops / peak.
  double seconds(Cost cost) const;
  // Both, one after the other.
  double unhidden_seconds(Cost cost) const;
};

struct Measured {
  double seconds = 0;  // median of a run
  Cost cost;
  Bounds bounds;
  // Median over the runs, each held against the bursts right before and after it: how fast a shared
  // machine reads and multiplies changes within seconds.
  double roofline_ratio = 0;
  double unhidden_ratio = 0;  // the same of unhidden_seconds()
  double roofline_seconds() const { return roofline_ratio * seconds; }
};

// Runs all works in turn, bursts between, until each work had about `seconds`, three times at
// least. A work's turn is as long as any other's: what a neighbour of this machine does for some
// seconds is in a part of each one's runs. Progress is said after every turn: seconds of works done
// and about how many there are.
using MeasuringProgress = std::function<void(double done, double of)>;
std::vector<Measured> measure(MachineSpeed& speed, const cpu::PeakLoop& peak,
                              std::span<const Work> works, double seconds,
                              const MeasuringProgress& progress = {});

// The instruction by which a table multiplies weights of a format.
const cpu::PeakLoop& peak_of_products(const MachineSpeed& speed, const cpu::KernelTable& kernels,
                                      DType format);
// .. and by which it computes attention.
const cpu::PeakLoop& peak_of_attention(const MachineSpeed& speed, const cpu::KernelTable& kernels);

// The same work with a GPU; nothing: there is none, or none for this.
struct GpuSeconds {
  std::optional<double> with_copy;  // computed by the CPU, brought to the card
  std::optional<double> on_card;
};

// A number, or null.
nlohmann::ordered_json or_null(std::optional<double> value);

// seconds, those with a GPU (null: there is none), bytes, ops, roofline_seconds, both ratios and
// what they were held against.
void add_fields(nlohmann::ordered_json& row, const Measured& m, const cpu::PeakLoop& peak,
                GpuSeconds gpu = {});

}  // namespace tandem
