#include "offload/plan/rates.h"

#include <algorithm>

namespace tandem {
namespace {

// Assumed: about a dozen kernels launched from a graph, and a dozen jobs of a thread team.
constexpr double kGpuLayerSeconds = 25e-6, kCpuLayerSeconds = 20e-6;

double cpu_read_rate(const Machine& m, const std::vector<int>& columns) {
  const auto n = static_cast<double>(m.nodes.size());
  if (m.nodes.size() == 1) return m.read_bytes_per_second();
  if (!columns.empty()) {
    double sum = 0, slowest = 0;  // columns; seconds to read one byte per column
    for (size_t i = 0; i < columns.size(); ++i) {
      sum += columns[i];
      slowest = std::max(slowest, columns[i] / m.nodes[i].read_bytes_per_second);
    }
    return sum / slowest;
  }
  double rate = 0;
  for (const NumaNode& node : m.nodes)
    rate += n / (1 / node.read_bytes_per_second + (n - 1) / m.cross_read_bytes_per_second);
  return std::min(rate, m.read_bytes_per_second());
}

}  // namespace

Rates rates_of(const Machine& m, DeviceId device, const std::vector<int>& numa_columns) {
  if (device.is_cpu())
    return {cpu_read_rate(m, numa_columns), m.peak, m.isa, m.curves, kCpuLayerSeconds};
  const Gpu& gpu = m.gpus[device.gpu];
  return {gpu.read_bytes_per_second, gpu.peak, "gpu", {}, kGpuLayerSeconds};
}

double peak_for(const Rates& rates, DType format, bool gpu) {
  const PeakRates& p = rates.peak;
  const double wide = p.bf16 > 0 ? p.bf16 : p.fp32;
  switch (format) {
    case DType::kF8E4M3:
      return gpu && p.fp8 > 0 ? p.fp8 : wide;
    case DType::kI8:
      return p.int8 > 0 ? p.int8 : wide;
    case DType::kI4:
    case DType::kI4TwoLevel:
      return !gpu && p.int8 > 0 ? p.int8 : wide;
    case DType::kF32:
      return p.fp32;
    default:
      return wide;
  }
}

double together(const Rates& r, double read_seconds, double op_seconds) {
  return r.kind == "gpu" ? std::max(read_seconds, op_seconds) : read_seconds + op_seconds;
}

double product_seconds(const Rates& r, Product product, DType format, ProductWork work) {
  const double peak = peak_for(r, format, r.kind == "gpu");
  return together(r, work.bytes / r.read_bytes_per_second, work.ops / peak) /
         product_ratio(r.kind, product, format, work.rows, r.measured);
}

}  // namespace tandem
