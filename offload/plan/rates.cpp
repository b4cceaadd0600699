#include "offload/plan/rates.h"

#include <algorithm>
#include <cmath>

namespace tandem {

namespace {

// Assumed: about a dozen kernels launched from a graph, and a dozen jobs of a thread team.
constexpr double kGpuLayerSeconds = 25e-6, kCpuLayerSeconds = 20e-6;

double cpu_read_rate(const HostKind& m, const std::vector<int>& columns) {
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

Rates rates_of(const Machine& m, DeviceId device, const NumaColumns& numa_columns) {
  const int kind = m.kind_of(device.host);
  const HostKind& host = m.of_kind(kind);
  if (device.is_cpu())
    return {cpu_read_rate(host, numa_columns.empty() ? std::vector<int>() : numa_columns[kind]),
            host.peak, host.isa, host.curves, kCpuLayerSeconds};
  const Gpu& gpu = host.gpus[device.gpu];
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

namespace {

using Point = std::pair<double, double>;  // x, ratio

// Interpolates linearly in log(x) between points, constant beyond them. x ascends.
double at(std::span<const Point> curve, double x) {
  if (x <= curve.front().first) return curve.front().second;
  for (size_t i = 1; i < curve.size(); ++i) {
    const auto& [a, at_a] = curve[i - 1];
    const auto& [b, at_b] = curve[i];
    if (x <= b) return at_a + (at_b - at_a) * std::log(x / a) / std::log(b / a);
  }
  return curve.back().second;
}

const EfficiencyCurve* find(Curves measured, std::string_view work, std::string_view format) {
  const auto it = std::find_if(measured.begin(), measured.end(), [&](const EfficiencyCurve& c) {
    return c.work == work && c.format == format;
  });
  return it == measured.end() ? nullptr : &*it;
}

std::string_view format_of_curve(DType format) {
  switch (format) {
    case DType::kF8E4M3:
      return "fp8";
    case DType::kI8:
      return "int8";
    case DType::kI4TwoLevel:
      return "int4";
    case DType::kI4:
      return "int4-bf16";
    default:
      return "bf16";
  }
}

// avx512: `bench experts`, `mlp` and `attention` of R1 on an AMD EPYC (family 26, model 2), the
// report with the least noise. INT4: docs/measurements and single runs, with the BF16 scales of K2.
// 128 rows per expert: docs/measurements/cpu_kernels.md, without a layer's work outside its
// products. The other instruction sets share these curves until measured; "reference" is not
// optimised for speed. The reports divided by the longer of reading and arithmetic; here the sum of
// both is used.
constexpr Point kAvx512ExpertsF8[] = {{1, 1.06}, {2.6, 1.06}, {4.8, 1.24}, {19, 1.20}, {76, 0.87}};
constexpr Point kAvx512ExpertsBf16[] = {
    {1, 1.04}, {1.1, 0.99}, {4.9, 1.20}, {9.8, 1.36}, {39, 1.15}};
constexpr Point kAvx512ExpertsI8[] = {{1, 1.00},   {1.3, 0.95}, {2.6, 1.07},
                                      {4.8, 1.11}, {19, 1.20},  {128, 0.86}};
constexpr Point kAvx512ExpertsI4[] = {{1, 1.05}, {2.3, 1.12}, {4.1, 1.24}, {16, 0.84}, {128, 0.79}};
constexpr Point kAvx512ExpertsI4Bf16[] = {
    {1, 0.99}, {1.1, 0.92}, {1.8, 0.86}, {10.7, 0.84}, {128, 0.68}};
constexpr Point kAvx512DenseF8[] = {{1, 1.06}, {8, 1.46}, {64, 0.95}, {512, 0.93}};
constexpr Point kAvx512DenseBf16[] = {{1, 1.06}, {8, 1.24}, {64, 1.11}, {512, 0.78}};
constexpr Point kAvx512Absorbed[] = {{512, 0.50}, {4096, 0.83}, {16384, 0.89}};
constexpr Point kAvx512Restored[] = {{512, 0.67}, {4096, 0.72}, {16384, 0.68}};

// amx: no such machine has been measured. One row: SGLang reached 85 % of the bandwidth on a Xeon
// 6980P. Many rows: kt-kernel reaches 31 to 35 % of the peak and a loop over the L2 cache can reach
// 75 %; the curves assume the middle, at the peak of a Xeon 6454S. INT4 with BF16 scales per 32
// columns: docs/measurements/amx_counts.md.
constexpr Point kAmxExperts[] = {{1, 0.81}, {4, 0.72}, {16, 0.67}, {64, 0.65}, {256, 0.79}};
constexpr Point kAmxExpertsI4[] = {{1, 0.65}, {4, 0.56}, {16, 0.50}, {64, 0.56}, {256, 0.80}};
constexpr Point kAmxExpertsI4Bf16[] = {{1, 0.65}, {4, 0.51}, {16, 0.38}, {64, 0.28}};
constexpr Point kAmxDense[] = {{1, 0.86}, {8, 0.63}, {64, 0.72}, {512, 0.64}};
constexpr Point kAmxAbsorbed[] = {{512, 0.27}, {4096, 0.64}, {16384, 0.82}};
constexpr Point kAmxRestored[] = {{512, 0.30}, {4096, 0.40}};

// gpu: DeepGEMM on H800 reads at 0.5 to 0.8 of 3.35 TB/s with 64 rows and computes at 0.5 to 0.7 of
// 1,979 TFLOPS with 4,096; FlashMLA reads at 0.9 and computes at 0.67 (published tables). The value
// for one row is assumed.
constexpr Point kGpuProducts[] = {{1, 0.70}, {64, 0.65}, {256, 0.45}, {4096, 0.60}};
constexpr Point kGpuAbsorbed[] = {{512, 0.40}, {4096, 0.67}};
constexpr Point kGpuRestored[] = {{512, 0.40}, {4096, 0.50}};

constexpr Point kReference[] = {{1, 0.02}};

}  // namespace

double product_ratio(std::string_view kind, Product product, DType format, double rows,
                     Curves measured) {
  const char* work = product == Product::kExperts ? "experts" : "dense";
  if (const EfficiencyCurve* curve = find(measured, work, format_of_curve(format)))
    return at(curve->points, rows);
  if (kind == "gpu") return at(kGpuProducts, rows);
  if (kind == "reference") return at(kReference, rows);
  const bool experts = product == Product::kExperts;
  if (kind == "amx") {
    if (!experts) return at(kAmxDense, rows);
    if (format == DType::kI4) return at(kAmxExpertsI4Bf16, rows);
    return format == DType::kI4TwoLevel ? at(kAmxExpertsI4, rows) : at(kAmxExperts, rows);
  }
  switch (format) {
    case DType::kI8:
      return at(kAvx512ExpertsI8, rows);
    case DType::kI4:
      return at(kAvx512ExpertsI4Bf16, rows);
    case DType::kI4TwoLevel:
      return at(kAvx512ExpertsI4, rows);
    case DType::kF8E4M3:
      return experts ? at(kAvx512ExpertsF8, rows) : at(kAvx512DenseF8, rows);
    default:
      return experts ? at(kAvx512ExpertsBf16, rows) : at(kAvx512DenseBf16, rows);
  }
}

double attention_ratio(std::string_view kind, bool absorbed, double context, Curves measured) {
  if (const EfficiencyCurve* curve = find(measured, absorbed ? "absorbed" : "restored", ""))
    return at(curve->points, context);
  if (kind == "gpu") return absorbed ? at(kGpuAbsorbed, context) : at(kGpuRestored, context);
  if (kind == "reference") return at(kReference, context);
  if (kind == "amx") return absorbed ? at(kAmxAbsorbed, context) : at(kAmxRestored, context);
  return absorbed ? at(kAvx512Absorbed, context) : at(kAvx512Restored, context);
}

}  // namespace tandem
