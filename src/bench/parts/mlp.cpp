// `tandem bench mlp`: the dense products of a layer, and its whole dense feed-forward network.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "bench/benchmark.h"
#include "bench/torch_baseline.h"
#include "core/rounding.h"
#include "model/cost.h"
#include "ops/cpu_ops.h"

namespace tandem {
namespace {

struct MatrixBytes {
  int64_t gate, down, o;
};
MatrixBytes matrix_bytes(const BenchInput& bench) {
  const ModelConfig& c = bench.config;
  return {matrix_bytes(c, c.dense_dim, c.dim, bench.formats.backbone),
          matrix_bytes(c, c.dim, c.dense_dim, bench.formats.backbone),
          matrix_bytes(c, c.dim, int64_t{c.mla.n_heads} * c.mla.v_dim, bench.formats.backbone)};
}

// Enough dense layers that weights come from memory, and no MoE layers.
ModelConfig dense_config(const BenchInput& bench) {
  ModelConfig c = bench.config;
  const MatrixBytes m = matrix_bytes(bench);
  const int64_t layer = 2 * m.gate + m.down + m.o;
  require(layer <= bench.memory_bytes,
          "a layer does not fit: it needs {:.2f} GB and {:.2f} GB may be used; choose a smaller "
          "format or raise --memory",
          gigabytes(layer), gigabytes(bench.memory_bytes));
  const int64_t wanted = ceil_div(cold_bytes(), layer);
  c.n_layers = static_cast<int>(std::min(wanted, bench.memory_bytes / layer));
  c.n_dense_layers = c.n_layers;
  return c;
}

bool is_measured(const WeightSpec& spec) {
  return spec.use == WeightUse::kDense ||
         (spec.use == WeightUse::kAttention && spec.name.find(".o_proj.") != std::string::npos);
}

constexpr const char* kNames[] = {"feed-forward", "gate", "attention output"};

// x: [most, columns] of inputs, heads, gate, up, output.
std::vector<Work> works_of(const BenchInput& bench, const ModelConfig& config, int n, Ops& ops,
                           const ModelWeights& weights, const TensorView (&x)[5]) {
  const MatrixBytes matrix = matrix_bytes(bench);
  const int64_t o_cols = int64_t{config.mla.n_heads} * config.mla.v_dim;
  const TensorView in = x[0].rows_from(0, n), heads = x[1].rows_from(0, n),
                   gate = x[2].rows_from(0, n), up = x[3].rows_from(0, n),
                   out = x[4].rows_from(0, n);
  const auto layer = [&weights, n_layers = config.n_layers](int64_t run) -> const LayerWeights& {
    return weights.layers[run % n_layers];
  };
  return {{{2 * matrix.gate + matrix.down, 2 * int64_t{3} * config.dim * config.dense_dim * n},
           [=, &ops](int64_t run) {
             const FfnWeights& w = layer(run).ffn;
             ops.gated_linear(in, w.gate, w.up, gate, up);
             ops.linear(gate, w.down, out);
           }},
          {{matrix.gate, 2 * int64_t{config.dim} * config.dense_dim * n},
           [=, &ops](int64_t run) { ops.linear(in, layer(run).ffn.gate, gate); }},
          {{matrix.o, 2 * config.dim * o_cols * n},
           [=, &ops](int64_t run) { ops.linear(heads, layer(run).attn.o, out); }}};
}

// The same work in PyTorch; `work` is its place in works_of().
void add_torch(TorchBaseline& torch, size_t work, const ModelConfig& c, int n,
               nlohmann::ordered_json& row) {
  const int64_t o_cols = int64_t{c.mla.n_heads} * c.mla.v_dim;
  row["torch_seconds"] = work == 0   ? torch.feed_forward(c.dim, c.dense_dim, n)
                         : work == 1 ? torch.linear(c.dense_dim, c.dim, n)
                                     : torch.linear(c.dim, o_cols, n);
  row["torch_version"] = torch.version();
}

void bench_mlp(const BenchInput& bench, const cpu::KernelTable& kernels, MachineSpeed& speed,
               const OnRow& on_row) {
  const ModelConfig config = dense_config(bench);
  CpuWeights home(kernels);
  const ModelWeights weights = random_weights(
      config, {bench.formats.backbone, bench.formats.backbone}, is_measured, home, speed.team());
  const int64_t most = most_of(bench.options.tokens);
  CpuOps ops(kernels, config, static_cast<int>(most), speed.team());

  const int64_t o_cols = int64_t{config.mla.n_heads} * config.mla.v_dim;
  const int64_t columns[] = {config.dim, o_cols, config.dense_dim, config.dense_dim, config.dim};
  TensorView x[5];
  const Arena arena = Arena::holding([&](auto visit) {
    for (int i = 0; i < 5; ++i) visit(x[i], most, columns[i], DType::kF32);
  });
  fill_with_normal(x[0]);
  fill_with_normal(x[1]);

  const cpu::PeakLoop peak = peak_of_products(speed, kernels, bench.formats.backbone.dtype);
  std::unique_ptr<GpuBenchModel> bench_model;
  if (bench.gpus)
    bench_model = bench.gpus({.config = config,
                              .formats = {bench.formats.backbone, bench.formats.backbone},
                              .wanted = is_measured,
                              .max_tokens = static_cast<int>(most)});
  std::vector<Buffer> memory;
  TensorView x_on_gpu[5];
  for (int i = 0; bench_model && i < 5; ++i) x_on_gpu[i] = on_gpu(*bench_model, x[i], memory);
  std::optional<TorchBaseline> torch;
  if (!bench.options.baseline.empty()) torch.emplace(speed.team().size(), bench.options.seconds);
  for (const int n : bench.options.tokens) {
    const std::vector<Work> works = works_of(bench, config, n, ops, weights, x);
    const std::vector<Measured> measured = measure(speed, peak, works, bench.options.seconds);
    for (size_t w = 0; w < measured.size(); ++w) {
      nlohmann::ordered_json row =
          new_row("mlp", bench, format_name(bench.formats.backbone), kernels, speed);
      row["what"] = kNames[w];
      row["tokens"] = n;
      GpuSeconds gpu;
      if (bench_model)
        gpu.on_gpu = seconds_on_gpu(
            *bench_model,
            works_of(bench, config, n, bench_model->ops(), bench_model->weights(), x_on_gpu)[w].run,
            bench.options.seconds);
      add_fields(row, measured[w], peak, gpu);
      if (torch) add_torch(*torch, w, config, n, row);
      on_row(row);
    }
  }
}

}  // namespace

Benchmark mlp_benchmark() {
  using enum BenchFlag;
  return {.name = "mlp",
          .help = "dense products and the feed-forward network of a dense layer",
          .examples = "  tandem bench mlp --config r1 --format fp8 --tokens 1,512\n",
          .flags = {kConfig, kIsa, kTokens, kCsv, kPlot, kFormat, kActivations, kBaseline},
          .on_cpu = bench_mlp};
}

}  // namespace tandem
