// How fast one device of a machine does a part's work.
#pragma once
#include <string>

#include "offload/plan/efficiency.h"
#include "offload/plan/placement.h"

namespace tandem {

struct Rates {
  double read_bytes_per_second;
  PeakRates peak;
  std::string kind;          // of efficiency.h
  Curves measured;           // of the machine, which outlives this
  double per_layer_seconds;  // starting a layer's kernels, or waking the team
};

// `numa_columns` as in Placement: slices read their own node's memory; without them every node
// reads from all.
Rates rates_of(const Machine& machine, DeviceId device, const std::vector<int>& numa_columns);

// The peak of the arithmetic in which a device multiplies weights kept as `format`.
double peak_for(const Rates& rates, DType format, bool gpu);

// What reading and arithmetic take together where nothing is lost: a GPU hides the shorter behind
// the longer, a CPU's core does one after the other (docs/planner.md has the measurements).
double together(const Rates& rates, double read_seconds, double op_seconds);

// What a product must move and compute, and how many rows of activations each of its matrices gets.
struct ProductWork {
  double bytes, ops, rows;
};
double product_seconds(const Rates& rates, Product product, DType format, ProductWork work);

}  // namespace tandem
