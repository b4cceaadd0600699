// `tandem bench experts`: a MoE layer's routed experts, as the engine runs them.
#include <nlohmann/json.hpp>
#include <random>

#include "bench/benchmark.h"
#include "bench/random_inputs.h"
#include "offload/cpu_experts.h"

namespace tandem {
namespace {

// Median seconds of a step, over the routings and layers in turn; x and y [tokens, dim] on the GPU.
double experts_on_gpu(GpuBenchModel& bench_model, std::span<const RandomRouting> steps,
                      int n_layers, TensorView x, TensorView y, double seconds) {
  const RoutingsOnGpu routings(bench_model, steps);
  return seconds_on_gpu(
      bench_model,
      [&](int64_t run) {
        const Ticket ticket = bench_model.experts().submit(
            {static_cast<int>(run % n_layers), x, routings.of_run(run)});
        bench_model.experts().add_to(ticket, y);
      },
      seconds);
}

// Throws Error where the memory is too small.
Resident resident_of(const BenchInput& bench) {
  return resident_experts(bench.config, bench.formats.experts, bench.memory_bytes, cold_bytes());
}

void bench_experts(const BenchInput& bench, const cpu::KernelTable& kernels, MachineSpeed& speed,
                   const OnRow& on_row) {
  const Resident resident = resident_of(bench);
  ModelConfig config = with_experts(bench.config, resident.experts);
  config.n_layers = resident.layers;
  config.n_dense_layers = 0;
  config.moe_layer_freq = 1;
  CpuWeights home(kernels, speed.team().topology());
  const ModelWeights weights = random_weights(
      config, {{DType::kBF16}, bench.formats.experts},
      [](const WeightSpec& spec) { return spec.use == WeightUse::kExpert; }, home, speed.team());

  const int most = most_of(bench.options.tokens);
  CpuExperts experts(kernels, config, weights, most, speed.team());
  TensorView x, y;
  const Arena arena = Arena::holding([&](auto visit) {
    visit(x, most, config.dim, DType::kF32);
    visit(y, most, config.dim, DType::kF32);
  });
  fill_with_normal(x);
  std::mt19937 rng(1);  // for the routings

  std::unique_ptr<GpuBenchModel> bench_model;
  if (bench.gpus)
    bench_model =
        bench.gpus({.config = config,
                    .formats = {{DType::kBF16}, bench.formats.experts},
                    .wanted = [](const WeightSpec& s) { return s.use == WeightUse::kExpert; },
                    .max_tokens = most});
  std::vector<Buffer> memory;
  const TensorView x_there = bench_model ? on_gpu(*bench_model, x, memory) : x,
                   y_there = bench_model ? on_gpu(*bench_model, y, memory) : y;

  const cpu::PeakLoop peak = peak_of_products(speed, kernels, bench.formats.experts.dtype);
  struct Case {
    int n;
    bool skew;
    std::vector<RandomRouting> steps;
    ExpertsCost cost;
  };
  std::vector<Case> cases;
  for (const int n : bench.options.tokens) {
    for (const bool skew : {false, true}) {
      if (skew && !bench.options.skew) break;
      std::vector<RandomRouting> steps = routings_of_equal_cost(config.router, n, skew, rng);
      const TensorView ids = steps[0].routing().ids;
      ExpertsCost cost = cost_of_experts(config, bench.formats.experts, ids);
      cost.instructions = instructions_of_experts(config, bench.formats.experts, ids, kernels);
      cases.push_back({n, skew, std::move(steps), cost});
    }
  }
  std::vector<Work> works;
  for (const Case& c : cases)
    works.push_back({c.cost, [&](int64_t run) {
                       const Ticket ticket = experts.submit(
                           {static_cast<int>(run % resident.layers), x.rows_from(0, c.n),
                            c.steps[run % std::ssize(c.steps)].routing()});
                       experts.add_to(ticket, y.rows_from(0, c.n));
                     }});
  const std::vector<Measured> measured =
      measure(speed, peak, works, bench.options.seconds, bench.options.progress);
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    nlohmann::ordered_json row =
        new_row("experts", bench, format_name(bench.formats.experts), kernels, speed);
    row["routing"] = c.skew ? "skewed" : "uniform";
    row["tokens"] = c.n;
    row["rows_per_expert"] =
        static_cast<double>(int64_t{c.n} * config.router.n_active) / c.cost.n_experts;
    GpuSeconds gpu;
    if (bench_model)
      gpu.on_gpu = experts_on_gpu(*bench_model, c.steps, resident.layers, x_there.rows_from(0, c.n),
                                  y_there.rows_from(0, c.n), bench.options.seconds);
    add_fields(row, measured[i], peak, gpu);
    row["rows_of_busiest_expert"] = c.cost.rows_of_busiest;
    row["experts"] = c.cost.n_experts;
    row["resident_experts"] = resident.experts;
    row["resident_layers"] = resident.layers;
    if (c.skew) row["seconds_over_uniform"] = measured[i].seconds / measured[i - 1].seconds;
    on_row(row);
  }
}

}  // namespace

Benchmark experts_benchmark() {
  using enum BenchFlag;
  return {.name = "experts",
          .help = "a MoE layer's routed experts",
          .examples =
              "  tandem bench experts --config k2 --experts bf16 --tokens 1,32 --json\n"
              "  tandem bench experts --tokens 64 --skew\n",
          .flags = {kConfig, kIsa, kTokens, kCsv, kPlot, kExperts, kSkew},
          .on_cpu = bench_experts};
}

}  // namespace tandem
