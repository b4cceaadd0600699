// `tandem bench kernels`: the card's small kernels, which move bytes and compute next to nothing.
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
// Whether a model has it.
bool has(const ModelConfig& config, SmallKernel kernel);
// What it must read and write for so many tokens.
int64_t bytes_of(SmallKernel kernel, const ModelConfig& config, int64_t n_tokens);

// Seconds of one on the card among others of its kind in a recorded graph, measured for about
// `seconds`. Nothing: its matrices do not fit the card.
using SmallKernelTimer =
    std::function<std::optional<double>(SmallKernel kernel, int n_tokens, double seconds)>;

struct KernelsBench {
  std::string config_name;
  ModelConfig config;
  std::vector<int> tokens;
  double seconds;  // a row
  // Empty, and no card's name and bandwidth: no GPU.
  SmallKernelTimer timer = {};
  std::string card = "";
  double read_bytes_per_second = 0;
};

// A launch, and a node of a graph, cost so much before the first byte has come.
constexpr double kLaunchSeconds = 3e-6;

// Rows as docs/benchmarks.md has them.
void bench_kernels(const KernelsBench& bench, const OnRow& on_row);
std::string kernels_header(const nlohmann::ordered_json& row);
std::string kernels_text(const nlohmann::ordered_json& row);

}  // namespace tandem
