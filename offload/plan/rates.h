// Speed of one device of a machine.
#pragma once
#include <string>

#include "offload/plan/efficiency.h"
#include "offload/plan/placement.h"

namespace tandem {

struct Rates {
  double read_bytes_per_second;
  PeakRates peak;
  std::string kind;          // as in efficiency.h
  Curves measured;           // curves of the machine, which must outlive this
  double per_layer_seconds;  // overhead: kernel launches on a GPU, thread team wake-ups on a CPU
};

// `numa_columns` as in Placement: with slices each node reads its own memory; without them every
// node reads from all nodes.
Rates rates_of(const Machine& machine, DeviceId device, const std::vector<int>& numa_columns);

// The arithmetic peak of a device for weights stored as `format`.
double peak_for(const Rates& rates, DType format, bool gpu);

// Ideal seconds of reading and arithmetic: a GPU overlaps them, a CPU core does one after the other
// (docs/measurements/planner.md has the measurements).
double together(const Rates& rates, double read_seconds, double op_seconds);

// Bytes and operations of a product, and the rows of activations of each of its matrices.
struct ProductWork {
  double bytes, ops, rows;
};
double product_seconds(const Rates& rates, Product product, DType format, ProductWork work);

}  // namespace tandem
