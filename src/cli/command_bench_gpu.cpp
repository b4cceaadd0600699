// tandem bench kernels and products: a GPU's kernels alone.
#include <algorithm>
#include <cstdio>

#include "bench/gpu_benches.h"
#include "bench/kernels_bench.h"
#include "bench/products_bench.h"
#include "cli/bench_options.h"
#include "core/check.h"

namespace tandem {
namespace {

// Prints rows as they arrive, in a table with its own columns.
using RowText = std::string (*)(const nlohmann::ordered_json& row);
OnRow table_printer(const Options& options, RowText header, RowText text) {
  return [&options, header, text, first = true](const nlohmann::ordered_json& row) mutable {
    const std::string line =
        options.json ? row.dump() + "\n" : (first ? header(row) : "") + text(row);
    first = false;
    std::fputs(line.c_str(), stdout);
    std::fflush(stdout);
  };
}

}  // namespace

int bench_kernels_command(const Options& options) {
  constexpr int64_t kColdBytes = 256 << 20;  // more than the caches of a GPU
  const BenchOptions& b = options.bench;
  require_sane(b);
  KernelsBench what = {.config_name = b.config,
                       .config = bench_config(b.config),
                       .tokens = list_or(b.tokens, {1, 8, 512}),
                       .seconds = b.seconds};
  what.timer = small_kernel_timer(
      what.config, *std::max_element(what.tokens.begin(), what.tokens.end()), kColdBytes);
  if (what.timer) {
    const Gpu gpu = measured_gpu_bounds(kGpuSeconds);
    what.gpu_name = gpu.name;
    what.read_bytes_per_second = gpu.read_bytes_per_second;
  }
  bench_kernels(what, table_printer(options, kernels_header, kernels_text));
  return 0;
}

int bench_products_command(const Options& options) {
  constexpr int kMinRows = 17;  // fewer use another kernel
  const BenchOptions& b = options.bench;
  require_sane(b);
  const ModelConfig config = bench_config(b.config);
  ProductsBench what = {.config_name = b.config,
                        .config = config,
                        .format = backbone_format(b.format, config),
                        .tokens = list_or(b.tokens, {512, 2048}),
                        .seconds = b.seconds};
  for (const int n : what.tokens)
    require(n >= kMinRows, "--tokens {}: at least {}; `bench mlp` has fewer", n, kMinRows);
  what.timer = product_timer(what.config, what.format, what.cublas);
  if (what.timer) {
    const Gpu gpu = measured_gpu_bounds(kGpuSeconds);
    what.gpu_name = gpu.name;
    what.peak_ops_per_second = gpu.peak.bf16;
  }
  bench_products(what, table_printer(options, products_header, products_text));
  return 0;
}

}  // namespace tandem
