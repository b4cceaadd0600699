// `tandem bench embed`: rows of the embedding table by token.
#include <nlohmann/json.hpp>
#include <random>

#include "bench/benchmark.h"
#include "bench/torch_baseline.h"
#include "model/cost.h"
#include "ops/cpu_ops.h"

namespace tandem {
namespace {

constexpr int kSteps = 64;  // with different tokens, so that rows come from memory

// The same rows from the GPU's table, and the CPU's result copied to the GPU.
class EmbedOnGpu {
 public:
  EmbedOnGpu(const BenchInput& bench, WeightFormat format, int most) : bench_(bench) {
    if (!bench.gpus) return;
    bench_model_ =
        bench.gpus({.config = bench.config,
                    .formats = {format, format},
                    .wanted = [](const WeightSpec& s) { return s.use == WeightUse::kEmbedding; },
                    .max_tokens = most});
    if (!bench_model_) return;
    memory_ = Arena(bench_model_->device().allocate(
        Arena::padded_bytes(most * bench.config.dim * size_of(DType::kF32))));
    out_ = Arena(memory_.memory()).matrix(most, bench.config.dim, DType::kF32);
    positions_.resize(most);
  }

  GpuSeconds seconds(const Work& on_cpu, TensorView made,
                     const std::vector<int32_t>& tokens) const {
    if (!bench_model_) return {};
    const auto n = static_cast<size_t>(made.rows);
    const TensorView out = out_.rows_from(0, made.rows);
    const auto copy = [&](int64_t run) {
      on_cpu.run(run);
      bench_model_->to_gpu(made, out);
      bench_model_->wait();
    };
    const auto embed = [&](int64_t run) {
      const std::span<const int32_t> own(tokens.data() + run % kSteps * made.rows, n);
      bench_model_->ops().begin({own, std::span(positions_).first(n), {}, {}});
      bench_model_->ops().embed(own, bench_model_->weights().embed, out);
    };
    return {seconds_on_gpu(*bench_model_, copy, bench_.options.seconds),
            seconds_on_gpu(*bench_model_, embed, bench_.options.seconds)};
  }

 private:
  const BenchInput& bench_;
  std::unique_ptr<GpuBenchModel> bench_model_;
  Arena memory_;
  TensorView out_;
  std::vector<int32_t> positions_;
};

void bench_embed(const BenchInput& bench, const cpu::KernelTable& kernels, MachineSpeed& speed,
                 const OnRow& on_row) {
  const ModelConfig& config = bench.config;
  const WeightFormat format = {DType::kBF16};
  const int64_t table_bytes = matrix_bytes(config, config.vocab, config.dim, format);
  require(table_bytes <= bench.memory_bytes,
          "the embedding table needs {:.2f} GB and {:.2f} GB may be used; raise --memory",
          gigabytes(table_bytes), gigabytes(bench.memory_bytes));
  CpuWeights home(kernels);
  const ModelWeights weights = random_weights(
      config, {format, format},
      [](const WeightSpec& spec) { return spec.use == WeightUse::kEmbedding; }, home, speed.team());
  const int most = most_of(bench.options.tokens);
  CpuOps ops(kernels, config, most, speed.team());
  TensorView out;
  const Arena arena =
      Arena::holding([&](auto visit) { visit(out, most, config.dim, DType::kF32); });

  const cpu::PeakLoop& peak = speed.best_peak_loop(cpu::Arithmetic::kF32, kernels.isa);
  std::mt19937 rng(1);
  std::uniform_int_distribution<int32_t> any_token(0, config.vocab - 1);
  std::vector<int32_t> tokens(static_cast<size_t>(most) * kSteps);
  for (int32_t& token : tokens) token = any_token(rng);
  const EmbedOnGpu on_gpu(bench, format, most);
  std::optional<TorchBaseline> torch;
  if (!bench.options.baseline.empty()) torch.emplace(speed.team().size(), bench.options.seconds);
  for (const int n : bench.options.tokens) {
    // Rows are read as BF16 and written as float.
    const Work work = {{n * config.dim * (size_of(DType::kBF16) + size_of(DType::kF32)), 0},
                       [&](int64_t run) {
                         const int64_t first = run % kSteps * n;
                         ops.embed({tokens.data() + first, static_cast<size_t>(n)}, weights.embed,
                                   out.rows_from(0, n));
                       }};
    nlohmann::ordered_json row = new_row("embed", bench, format_name(format), kernels, speed);
    row["tokens"] = n;
    const Measured measured = measure(speed, peak, {&work, 1}, bench.options.seconds)[0];
    add_fields(row, measured, peak, on_gpu.seconds(work, out.rows_from(0, n), tokens));
    if (torch) {
      row["torch_seconds"] = torch->embed(config.vocab, config.dim, n);
      row["torch_version"] = torch->version();
    }
    on_row(row);
  }
}

}  // namespace

Benchmark embed_benchmark() {
  using enum BenchFlag;
  return {.name = "embed",
          .help = "rows of the embedding table",
          .examples = "  tandem bench embed --config r1 --plot embed.svg\n",
          .flags = {kConfig, kIsa, kTokens, kCsv, kPlot, kBaseline},
          .on_cpu = bench_embed};
}

}  // namespace tandem
