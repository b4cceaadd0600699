// `tandem bench head`: the products with the smallest and the largest matrix of a step, router and
// output head.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "bench/benchmark.h"
#include "core/rounding.h"
#include "model/cost.h"
#include "ops/cpu_ops.h"

namespace tandem {
namespace {

// As many layers, all with experts, as routers come from memory.
ModelConfig router_config(const BenchInput& bench) {
  ModelConfig c = bench.config;
  const int64_t router = matrix_bytes(c, c.router.n_experts, c.dim, {DType::kBF16});
  const int64_t head = matrix_bytes(c, c.vocab, c.dim, {DType::kBF16});
  require(head + router <= bench.memory_bytes,
          "the head and a router need {:.2f} GB and {:.2f} GB may be used; raise --memory",
          gigabytes(head + router), gigabytes(bench.memory_bytes));
  c.n_layers = static_cast<int>(
      std::min(ceil_div(cold_bytes(), router), (bench.memory_bytes - head) / router));
  c.n_dense_layers = 0;
  c.moe_layer_freq = 1;
  c.n_mtp_layers = 0;
  c.tied_head = false;
  return c;
}

bool is_head_or_router(const WeightSpec& spec) {
  return spec.use == WeightUse::kHead || spec.use == WeightUse::kRouter ||
         spec.use == WeightUse::kRouterBias;
}

struct Matrices {
  TensorView x, logits, scores;
  Routing chosen;

  template <class Visit>
  void for_each(const ModelConfig& c, int64_t most, Visit visit) {
    visit(x, most, c.dim, DType::kF32);
    visit(logits, most, c.vocab, DType::kF32);
    visit(scores, most, c.router.n_experts, DType::kF32);
    visit(chosen.ids, most, c.router.n_active, DType::kI32);
    visit(chosen.weights, most, c.router.n_active, DType::kF32);
  }
};

constexpr const char* kHeadRows[] = {"router", "output head"};

std::vector<Work> head_works(const ModelConfig& c, int n, Ops& ops, const ModelWeights& weights,
                             const Matrices& a) {
  const int64_t experts = c.router.n_experts, vocab = c.vocab;
  const auto first = [n](TensorView t) { return t.rows_from(0, n); };
  return {
      {{matrix_bytes(c, experts, c.dim, {DType::kBF16}), 2 * experts * c.dim * n},
       [=, &c, &ops, &weights](int64_t run) {
         const LayerWeights& w = weights.layers[run % c.n_layers];
         ops.route({first(a.x),
                    w.router,
                    w.router_bias,
                    c.router,
                    first(a.scores),
                    {first(a.chosen.ids), first(a.chosen.weights)}});
       }},
      {{matrix_bytes(c, vocab, c.dim, {DType::kBF16}), 2 * vocab * c.dim * n},
       [=, &ops, &weights](int64_t) { ops.linear(first(a.x), weights.head, first(a.logits)); }}};
}

void bench_head(const BenchInput& bench, const cpu::KernelTable& kernels, MachineSpeed& speed,
                const OnRow& on_row) {
  const WeightFormat format = {DType::kBF16};
  const ModelConfig config = router_config(bench);
  CpuWeights home(kernels);
  const ModelWeights weights =
      random_weights(config, {format, format}, is_head_or_router, home, speed.team());
  const int most = most_of(bench.options.tokens);
  CpuOps ops(kernels, config, most, speed.team());
  Matrices a, a_there;
  const Arena arena = Arena::holding([&](auto visit) { a.for_each(config, most, visit); });
  fill_with_normal(a.x);
  std::unique_ptr<GpuBenchModel> bench_model;
  if (bench.gpus)
    bench_model = bench.gpus({.config = config,
                              .formats = {format, format},
                              .wanted = is_head_or_router,
                              .max_tokens = most});
  Arena arena_there;
  if (bench_model) {
    arena_there =
        Arena::holding([&](auto visit) { a_there.for_each(config, most, visit); },
                       [&](int64_t bytes) { return bench_model->device().allocate(bytes); });
    bench_model->to_gpu(a.x, a_there.x);
  }
  const cpu::PeakLoop& peak = peak_of_products(speed, kernels, format.dtype);
  for (const int n : bench.options.tokens) {
    const std::vector<Work> works = head_works(config, n, ops, weights, a);
    const std::vector<Measured> measured = measure(speed, peak, works, bench.options.seconds);
    for (size_t w = 0; w < measured.size(); ++w) {
      nlohmann::ordered_json row = new_row("head", bench, format_name(format), kernels, speed);
      row["what"] = kHeadRows[w];
      row["tokens"] = n;
      GpuSeconds gpu;
      if (bench_model)
        gpu.on_gpu = seconds_on_gpu(
            *bench_model,
            head_works(config, n, bench_model->ops(), bench_model->weights(), a_there)[w].run,
            bench.options.seconds);
      add_fields(row, measured[w], peak, gpu);
      on_row(row);
    }
  }
}

}  // namespace

Benchmark head_benchmark() {
  using enum BenchFlag;
  return {.name = "head",
          .help = "the router's product and choice, and the output head's product",
          .examples = "  tandem bench head --config r1 --tokens 1,64\n",
          .flags = {kConfig, kIsa, kTokens, kCsv, kPlot},
          .tokens = {1, 2, 4, 8, 16, 32, 64, 128, 256},
          .on_cpu = bench_head};
}

}  // namespace tandem
