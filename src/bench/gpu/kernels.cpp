// `tandem bench kernels`: the GPU's small kernels, which move bytes and compute little.
#include <fmt/format.h>

#include "bench/gpu/gpu_benches.h"
#include "core/check.h"
#include "io/json.h"
#include "model/kv_layout.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

// Time of a launch, or of a graph node, before its first byte arrives.
constexpr double kLaunchSeconds = 3e-6;

// Allowed ratio of a kernel's time to the time of moving its bytes.
constexpr double kSlack = 1.3;

// bytes / bandwidth, regardless of other fields of the row.
void add_bound(Json& row, int64_t bytes, double bandwidth, const std::optional<double>& seconds) {
  const double moving = static_cast<double>(bytes) / bandwidth;
  const double bound = moving + kLaunchSeconds, target = kSlack * moving + kLaunchSeconds;
  row["read_bytes_per_second"] = bandwidth;
  row["bound_seconds"] = bound;
  row["ratio"] = seconds ? Json(*seconds / bound) : Json();
  row["target_seconds"] = target;
  row["within_target"] = seconds ? Json(*seconds <= target) : Json();
}

}  // namespace

const char* name_of(SmallKernel kernel) {
  constexpr const char* kNames[] = {"embed",   "rms_norm",   "append_kv",   "append_fp8",
                                    "route",   "sort_pairs", "gather_rows", "round_rows",
                                    "combine", "silu_mul",   "add"};
  static_assert(std::size(kNames) == static_cast<size_t>(SmallKernel::kKernels));
  return kNames[static_cast<size_t>(kernel)];
}

bool has(const ModelConfig& config, SmallKernel kernel) {
  const bool of_experts = kernel == SmallKernel::kRoute || kernel == SmallKernel::kSortPairs ||
                          kernel == SmallKernel::kCombine;
  return !of_experts || config.router.n_experts > 0;
}

// Activations are float, the cache and the embedding BF16 (docs/gpu.md). Every number is moved
// once, regardless of cache hits.
int64_t bytes_of(SmallKernel kernel, const ModelConfig& c, int64_t n) {
  constexpr int64_t kFloat = 4, kBf16 = 2, kIndex = 4;
  const int64_t kv = c.mla.cache_dim(), dim = c.dim;
  const int64_t pairs = n * c.router.n_active, experts = c.router.n_experts;
  // Appending: position, row, queries in place, latent and key; gain and frequencies.
  const int64_t of_token =
      2 * kIndex + int64_t{c.mla.n_heads} * c.mla.rope_dim * 2 * kFloat + kv * kFloat;
  const int64_t once = (c.mla.kv_rank + c.mla.rope_dim / 2) * kFloat;
  switch (kernel) {
    case SmallKernel::kEmbed:
      return n * (kIndex + dim * (kBf16 + kFloat));
    case SmallKernel::kNorm:
      return n * dim * 4 * kFloat + dim * kFloat;
    case SmallKernel::kAppend:
      return n * (of_token + kv * kBf16) + once;
    case SmallKernel::kAppendFp8:
      return n * (of_token + kFp8TokenBytes) + once;
    case SmallKernel::kRoute:  // weights in float
      return n * dim * kFloat + experts * dim * kFloat +
             (c.router.has_bias() ? experts * kFloat : 0) + pairs * (kIndex + kFloat);
    case SmallKernel::kSortPairs:
      return pairs * 3 * kIndex + (experts + 1) * kIndex;
    case SmallKernel::kGather:
      return n * (kIndex + dim * 2 * kFloat);
    case SmallKernel::kRound:
      return n * dim * (kFloat + kBf16);
    case SmallKernel::kCombine:  // one row per pair, and the sum that is read and written
      return pairs * (dim * kFloat + kIndex + kFloat) + n * dim * 2 * kFloat;
    case SmallKernel::kSiluMul:
      return n * c.dense_dim * 3 * kFloat;
    case SmallKernel::kAdd:
      return n * dim * 3 * kFloat;
    case SmallKernel::kKernels:
      break;
  }
  check(false, "a small kernel");
  return 0;
}

void bench_kernels(const BenchInput& bench, const SmallKernelTimer& timer, const OnRow& on_row) {
  for (int k = 0; k < static_cast<int>(SmallKernel::kKernels); ++k) {
    const auto kernel = static_cast<SmallKernel>(k);
    if (!has(bench.config, kernel)) continue;
    for (const int n : bench.options.tokens) {
      const int64_t bytes = bytes_of(kernel, bench.config, n);
      std::optional<double> seconds;
      if (timer) seconds = timer(kernel, n, bench.options.seconds);
      Json row = {{"bench", "kernels"},
                  {"config", bench.options.config},
                  {"card", timer ? bench.gpu->name : ""},
                  {"what", name_of(kernel)},
                  {"tokens", n},
                  {"bytes", bytes},
                  {"gpu_seconds", or_null(seconds)}};
      if (timer) add_bound(row, bytes, bench.gpu->read_bytes_per_second, seconds);
      on_row(row);
    }
  }
}

namespace {

std::string kernels_header(const Json& row) {
  const std::string of = "small kernels of " + row["config"].get<std::string>();
  if (!row.contains("bound_seconds"))
    return of +
           ": no GPU\n\n| kernel      | tokens |       MB |\n|:------------|-------:|---------:|\n";
  return fmt::format(
      "{} on {}, which reads {:.0f} GB/s; bound: bytes / that + {:.0f} us\n\n"
      "| kernel      | tokens |       MB |   GPU us | bound us |  ratio | target |\n"
      "|:------------|-------:|---------:|---------:|---------:|-------:|:-------|\n",
      of, row["card"].get<std::string>(), row["read_bytes_per_second"].get<double>() * 1e-9,
      kLaunchSeconds * 1e6);
}

std::string kernels_text(const Json& row) {
  std::string text = fmt::format("| {:<11} | {:>6} | {:>8.4g} |", row["what"].get<std::string>(),
                                 row["tokens"].get<int>(), row["bytes"].get<double>() * 1e-6);
  if (!row.contains("bound_seconds")) return text + "\n";
  const bool measured = row["gpu_seconds"].is_number();
  const auto number = [&](const char* key, double unit) {
    return row[key].is_number() ? fmt::format("{:.2f}", row[key].get<double>() * unit) : "no room";
  };
  return text + fmt::format(" {:>8} | {:>8} | {:>6} | {:<6} |\n", number("gpu_seconds", 1e6),
                            number("bound_seconds", 1e6), measured ? number("ratio", 1) : "",
                            !measured                          ? ""
                            : row["within_target"].get<bool>() ? "met"
                                                               : "missed");
}

void bench_on_gpu(const BenchInput& bench, const OnRow& on_row) {
  constexpr int64_t kColdBytes = 256 << 20;  // more than the caches of a GPU
  bench_kernels(bench, small_kernel_timer(bench.config, most_of(bench.options.tokens), kColdBytes),
                on_row);
}

}  // namespace

Benchmark kernels_benchmark() {
  using enum BenchFlag;
  return {.name = "kernels",
          .help = "small kernels of a GPU beside the bytes that they move",
          .examples = "  tandem bench kernels --config r1 --tokens 1,8,512\n",
          .flags = {kConfig, kTokens},
          .tokens = {1, 8, 512},
          .alone = bench_on_gpu,
          .header = kernels_header,
          .text = kernels_text};
}

}  // namespace tandem
