// Speed of one device of a machine.
#pragma once
#include <span>
#include <string>
#include <string_view>

#include "core/machine.h"
#include "core/tensor.h"
#include "offload/plan/placement.h"

namespace tandem {

// Efficiency of products and attention: ideal time of reading and arithmetic (together()) divided
// by measured time, by number of rows. A CPU that overlaps part of the two exceeds 1. The machine's
// own curves take precedence over a table of defaults; each default states its origin.
enum class Product { kExperts, kDense };
using Curves = std::span<const EfficiencyCurve>;

// Efficiency of products with matrices stored as `format` on a device of `kind`, an instruction set
// or "gpu". `rows` are activation rows: per expert for kExperts, of the whole batch for kDense.
double product_ratio(std::string_view kind, Product product, DType format, double rows,
                     Curves measured = {});

// Efficiency of attention over a cache of `context` tokens, in absorbed form or with restored keys
// and values.
double attention_ratio(std::string_view kind, bool absorbed, double context, Curves measured = {});

struct Rates {
  double read_bytes_per_second;
  PeakRates peak;
  std::string kind;          // instruction set or "gpu", as for product_ratio()
  Curves measured;           // curves of the machine, which must outlive this
  double per_layer_seconds;  // overhead: kernel launches on a GPU, thread team wake-ups on a CPU
};

// `numa_columns` as in Placement: with slices each node reads its own memory; without them every
// node reads from all nodes.
Rates rates_of(const Machine& machine, DeviceId device, const NumaColumns& numa_columns);

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
