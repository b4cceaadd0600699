// `tandem bench kernels`: the GPU's small kernels, which move bytes and compute little.
#pragma once
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>

#include "bench/experts_bench.h"
#include "model/config.h"

namespace tandem {

enum class SmallKernel : uint8_t {
  kEmbed,
  kNorm,
  kRope,
  kAppend,
  kAppendFp8,
  kRoute,
  kSortPairs,
  kGather,
  kRound,
  kCombine,
  kSiluMul,
  kAdd,
  kKernels
};
const char* name_of(SmallKernel kernel);
// Whether the model uses the kernel.
bool has(const ModelConfig& config, SmallKernel kernel);
// Bytes that the kernel must read and write for n_tokens tokens.
int64_t bytes_of(SmallKernel kernel, const ModelConfig& config, int64_t n_tokens);

// Seconds of one kernel among others of its kind in a recorded graph, measured for about `seconds`.
// Empty if its matrices do not fit in GPU memory.
using SmallKernelTimer =
    std::function<std::optional<double>(SmallKernel kernel, int n_tokens, double seconds)>;

struct KernelsBench {
  std::string config_name;
  ModelConfig config;
  std::vector<int> tokens;
  double seconds;  // per row
  // Without a GPU: timer and name empty, bandwidth 0.
  SmallKernelTimer timer = {};
  std::string gpu_name = "";
  double read_bytes_per_second = 0;
};

// Time of a launch, or of a graph node, before its first byte arrives.
constexpr double kLaunchSeconds = 3e-6;

// Rows are described in docs/benchmarks.md.
void bench_kernels(const KernelsBench& bench, const OnRow& on_row);
std::string kernels_header(const nlohmann::ordered_json& row);
std::string kernels_text(const nlohmann::ordered_json& row);

}  // namespace tandem
