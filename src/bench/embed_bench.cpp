#include "bench/embed_bench.h"

#include <algorithm>
#include <random>

#include "bench/roofline.h"
#include "offload/plan/cost.h"
#include "ops/cpu_ops.h"

namespace tandem {
namespace {

constexpr int kSteps = 64;  // of different tokens, so that rows come from memory

}  // namespace

void bench_embed(const EmbedBench& bench, const cpu::KernelTable& kernels, MachineSpeed& speed,
                 const OnRow& on_row) {
  const ModelConfig& config = bench.config;
  const WeightFormat format = {DType::kBF16};
  const int64_t table_bytes = matrix_bytes(config, config.vocab, config.dim, format);
  require(table_bytes <= bench.memory_bytes,
          "the embedding table needs {:.2f} GB and {:.2f} GB may be used; raise --memory",
          static_cast<double>(table_bytes) * 1e-9, static_cast<double>(bench.memory_bytes) * 1e-9);
  CpuWeights home(kernels);
  const ModelWeights weights = random_weights(
      config, {format, format},
      [](const WeightSpec& spec) { return spec.use == WeightUse::kEmbedding; }, home, speed.team());
  const int most = *std::max_element(bench.tokens.begin(), bench.tokens.end());
  CpuOps ops(kernels, config, most, speed.team());
  TensorView out;
  const Arena arena =
      Arena::holding([&](auto visit) { visit(out, most, config.dim, DType::kF32); });

  const cpu::PeakLoop& peak = speed.best_peak_loop(cpu::Arithmetic::kF32, kernels.isa);
  std::mt19937 rng(1);
  std::uniform_int_distribution<int32_t> any_token(0, config.vocab - 1);
  std::vector<int32_t> tokens(static_cast<size_t>(most) * kSteps);
  for (int32_t& token : tokens) token = any_token(rng);
  for (const int n : bench.tokens) {
    // Rows are read in BF16 and written as float.
    const Work work = {{n * config.dim * (size_of(DType::kBF16) + size_of(DType::kF32)), 0},
                       [&](int64_t run) {
                         const int64_t first = run % kSteps * n;
                         ops.embed({tokens.data() + first, static_cast<size_t>(n)}, weights.embed,
                                   out.rows_from(0, n));
                       }};
    nlohmann::ordered_json row = {
        {"bench", "embed"},    {"config", bench.config_name},    {"format", format_name(format)},
        {"isa", kernels.name}, {"threads", speed.team().size()}, {"tokens", n}};
    add_fields(row, measure(speed, peak, {&work, 1}, bench.seconds)[0], peak);
    on_row(row);
  }
}

}  // namespace tandem
