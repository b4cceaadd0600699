#include "gpu_kernels/gpu_facts.h"

#include <fmt/format.h>

#include <cstdlib>
#include <string_view>

namespace tandem::gpu {

std::string only_gpu(std::optional<std::string> visible, int index) {
  if (!visible) return std::to_string(index);
  std::string_view rest = *visible;
  if (rest.find(',') == std::string_view::npos) return *visible;
  for (; index > 0; --index) {
    const size_t comma = rest.find(',');
    if (comma == std::string_view::npos) return "";
    rest.remove_prefix(comma + 1);
  }
  return std::string(rest.substr(0, rest.find(',')));
}

std::string why_not(const GpuFacts& f) {
  if (f.driver <= 0) return "this machine has no NVIDIA driver: install one, or use --device cpu";
  if (f.count == GpuFacts::Count::kDriverTooOld)
    return fmt::format(
        "the NVIDIA driver supports CUDA {} and this program was built with {}: install a newer "
        "driver, or use --device cpu",
        version_text(f.driver), version_text(f.toolkit));
  if (f.count == GpuFacts::Count::kFailed || f.n_gpus <= 0)
    return fmt::format("no NVIDIA GPU can be used ({}): check nvidia-smi, or use --device cpu",
                       f.count_error.empty() ? "the driver finds none" : f.count_error);
  if (f.major < 8)
    return fmt::format("{} has compute capability {}.{}: 8.0 or newer is needed; use --device cpu",
                       f.name, f.major, f.minor);
  if (f.kernels == GpuFacts::Kernels::kForOthers)
    return fmt::format(
        "this program was built for other GPUs than {} (compute capability {}.{}): build it with "
        "-DTANDEM_CUDA=all, or use --device cpu",
        f.name, f.major, f.minor);
  if (f.kernels == GpuFacts::Kernels::kPtxTooNew)
    return fmt::format(
        "the NVIDIA driver supports CUDA {} and cannot compile this program's PTX of CUDA {} for "
        "{}: install a newer driver, or use --device cpu",
        version_text(f.driver), version_text(f.toolkit), f.name);
  return "";
}

bool has_fp8_mma(const GpuFacts& f) {
  constexpr int kFirst = 89;
  return 10 * f.major + f.minor >= kFirst && f.compiled_for >= kFirst;
}

namespace {

// What data sheets count, found by dividing published peaks by multiprocessors and clock
// (gpu_facts_test has the figures).
struct TensorRate {
  int capability;         // 10 * major + minor
  std::string_view name;  // a part of the GPU's name
  double ops_per_clock;   // of a multiprocessor
  double clock_share;     // clock of the data sheet's tensor figures over the highest clock
};
// The first match counts. GeForce GPUs multiply at half of the chip's rate where sums are float.
// Others of their compute capabilities do so (L40, A10G) or have the full rate of 1024 (A40, L40S,
// RTX PRO 6000), which CUDA does not tell; they are left out. On Hopper GPUs the data sheet counts
// tensor operations at 1830 of 1980 MHz (SXM) and 1620 of 1755 MHz (PCIe), on a B200 at 1856 of
// 1965 MHz. NVL boards have another limit, and an H20 has a quarter of the rate.
constexpr TensorRate kTensorRates[] = {{80, "", 2048, 1},
                                       {86, "GeForce", 512, 1},
                                       {89, "GeForce", 512, 1},
                                       {90, "NVL", 0, 0},
                                       {90, "H100", 4096, 12. / 13},
                                       {90, "H200", 4096, 12. / 13},
                                       {90, "H800", 4096, 12. / 13},
                                       {100, " B200", 8192, 17. / 18},
                                       {120, "GeForce", 512, 1}};

}  // namespace

double datasheet_bf16_ops_per_second(const GpuFacts& f, int n_multiprocessors, int kilohertz) {
  for (const TensorRate& rate : kTensorRates)
    if (rate.capability == 10 * f.major + f.minor && f.name.find(rate.name) != std::string::npos)
      return n_multiprocessors * rate.ops_per_clock * rate.clock_share * kilohertz * 1e3;
  return 0;
}

std::string version_text(int cuda_version) {
  return fmt::format("{}.{}", cuda_version / 1000, cuda_version % 1000 / 10);
}

std::string failure_text(const char* what, const char* name, Caller at) {
  return fmt::format(
      "the GPU failed: {} ({}, at {}:{}): check nvidia-smi and dmesg, then start the program "
      "again, or use --device cpu",
      what, name, at.file, at.line);
}

std::optional<int64_t> memory_option() {
  const char* bytes = std::getenv("TANDEM_GPU_MEMORY");
  if (!bytes) return {};
  return std::atoll(bytes);
}

int capability_option() {
  const char* capability = std::getenv("TANDEM_GPU_CAPABILITY");
  return capability ? std::atoi(capability) : 89;
}

bool watchdog_option() {
  const char* set = std::getenv("TANDEM_GPU_WATCHDOG");
  return set && *set == '1';
}

bool early_launches(int major) {
  const char* set = std::getenv("TANDEM_GPU_EARLY");
  return set && *set == '1' && major >= 9;
}

}  // namespace tandem::gpu
