// `tandem bench moe` and `layer`: the feed-forward part of a MoE layer, and whole layers as the
// forward pass runs them.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>

#include "bench/benchmark.h"
#include "bench/random_inputs.h"
#include "engine/step_runner.h"
#include "model/cost.h"
#include "offload/cpu_experts.h"
#include "ops/cpu_ops.h"

namespace tandem {
namespace {

constexpr int kVocab = 1024;  // for models of which only layers are measured

// Only MoE layers, with as many experts as fit besides `other_bytes`; or only dense layers.
ModelConfig only_layers(const BenchInput& bench, bool moe, int64_t other_bytes) {
  ModelConfig c = bench.config;
  check_layers(bench.options.layers);
  c.vocab = std::min(c.vocab, kVocab);
  c.n_layers = bench.options.layers;
  c.n_dense_layers = moe ? 0 : c.n_layers;
  c.moe_layer_freq = 1;
  c.n_mtp_layers = 0;
  const CostOfParts cost = cost_of_layer(c, bench.formats, moe, 0, 0, 0);
  const int64_t left = bench.memory_bytes - c.n_layers * cost.matrices.bytes - other_bytes;
  require(left > 0,
          "{} layers need {:.2f} GB without experts, and {:.2f} GB may be used; choose fewer "
          "--layers, a shorter --ctx or raise --memory",
          c.n_layers, gigabytes(bench.memory_bytes - left), gigabytes(bench.memory_bytes));
  if (!moe) return with_experts(c, 0);
  const int n = resident_experts(c, bench.formats.experts, left / c.n_layers, 0).experts;
  return with_simulated_routing(bench, with_experts(c, n));
}

bool is_of_moe(const WeightSpec& spec) {
  return spec.use == WeightUse::kExpert || spec.use == WeightUse::kShared ||
         spec.use == WeightUse::kRouter || spec.use == WeightUse::kRouterBias;
}

struct MoeMatrices {
  TensorView x, y, gate, up, scores;
  Routing unused;

  template <class Visit>
  void for_each(const ModelConfig& config, int64_t most, Visit visit) {
    visit(x, most, config.dim, DType::kF32);
    visit(y, most, config.dim, DType::kF32);
    visit(gate, most, config.shared_dim(), DType::kF32);
    visit(up, most, config.shared_dim(), DType::kF32);
    visit(scores, most, config.router.n_experts, DType::kF32);
    visit(unused.ids, most, config.router.n_active, DType::kI32);
    visit(unused.weights, most, config.router.n_active, DType::kF32);
  }
};

// Runs the MoE part of DeepSeek::layers with a given routing. The router's choice is
// computed but not used, so that every step has equal cost.
void run_moe(const ModelConfig& config, Ops& ops, ExpertPool& experts, const ModelWeights& weights,
             const MoeMatrices& a, int n, int64_t run, const Routing& routing) {
  const auto first = [&](TensorView t) { return t.rows_from(0, n); };
  const int layer = static_cast<int>(run % config.n_layers);
  const LayerWeights& w = weights.layers[layer];
  const TensorView h = first(a.x), y = first(a.y), gate = first(a.gate), up = first(a.up);
  ops.route({h,
             w.router,
             w.router_bias,
             config.router,
             first(a.scores),
             {first(a.unused.ids), first(a.unused.weights)}});
  const Ticket ticket = experts.submit({layer, h, routing});
  if (config.shared_dim() > 0) {
    ops.gated_linear(h, w.ffn.gate, w.ffn.up, gate, up);
    ops.linear(gate, w.ffn.down, y);
  }
  experts.add_to(ticket, y);
}

// Measures router, shared experts and routed experts.
void bench_moe(const BenchInput& bench, const cpu::KernelTable& kernels, MachineSpeed& speed,
               const OnRow& on_row) {
  const ModelConfig config = only_layers(bench, true, 0);
  CpuWeights home(kernels, speed.team().topology());
  const ModelWeights weights = random_weights(config, bench.formats, is_of_moe, home, speed.team());
  const int most = most_of(bench.options.tokens);
  CpuOps ops(kernels, config, most, speed.team());
  CpuExperts experts(kernels, config, weights, most, speed.team());
  MoeMatrices a, a_there;
  const int64_t width = config.shared_dim();
  const Arena arena = Arena::holding([&](auto visit) { a.for_each(config, most, visit); });
  Arena arena_there;
  std::unique_ptr<GpuBenchModel> bench_model;
  if (bench.gpus)
    bench_model = bench.gpus(
        {.config = config, .formats = bench.formats, .wanted = is_of_moe, .max_tokens = most});
  if (bench_model)
    arena_there =
        Arena::holding([&](auto visit) { a_there.for_each(config, most, visit); },
                       [&](int64_t bytes) { return bench_model->device().allocate(bytes); });
  fill_with_normal(a.x);
  std::mt19937 rng(1);  // for the routings
  if (bench_model) bench_model->to_gpu(a.x, a_there.x);

  const int64_t shared = matrix_bytes(config, 3 * width, config.dim, bench.formats.backbone);
  const int64_t router = matrix_bytes(config, config.router.n_experts, config.dim, {DType::kBF16});
  const cpu::PeakLoop peak = peak_of_products(speed, kernels, bench.formats.experts.dtype);
  for (const int n : bench.options.tokens) {
    const auto routings = routings_of_equal_cost(config.router, n, false, rng);
    const ExpertsCost routed =
        cost_of_experts(config, bench.formats.experts, routings[0].routing().ids);
    const Cost cost = {
        routed.bytes + shared + router,
        routed.ops + 2 * int64_t{n} * config.dim * (3 * width + config.router.n_experts)};
    const Work work = {cost, [&](int64_t run) {
                         run_moe(config, ops, experts, weights, a, n, run,
                                 routings[run % std::ssize(routings)].routing());
                       }};
    GpuSeconds gpu;
    if (bench_model) {
      const RoutingsOnGpu there(*bench_model, routings);
      gpu.on_gpu = seconds_on_gpu(
          *bench_model,
          [&](int64_t run) {
            run_moe(config, bench_model->ops(), bench_model->experts(), bench_model->weights(),
                    a_there, n, run, there.of_run(run));
          },
          bench.options.seconds);
    }
    nlohmann::ordered_json row =
        new_row("moe", bench, format_name(bench.formats.experts), kernels, speed);
    row["tokens"] = n;
    row["rows_per_expert"] =
        static_cast<double>(int64_t{n} * config.router.n_active) / routed.n_experts;
    add_fields(row, measure(speed, peak, {&work, 1}, bench.options.seconds)[0], peak, gpu);
    row["experts"] = routed.n_experts;
    row["resident_experts"] = config.router.n_experts;
    row["resident_layers"] = config.n_layers;
    on_row(row);
  }
}

// Measures whole dense and MoE layers, from residual stream to residual stream.
void bench_layer(const BenchInput& bench, const cpu::KernelTable& kernels, MachineSpeed& speed,
                 const OnRow& on_row) {
  const DType cache_type = cache_type_for(kernels);
  const int longest = most_of(bench.options.contexts), most = most_of(bench.options.tokens);
  const cpu::PeakLoop peak = peak_of_products(speed, kernels, bench.formats.experts.dtype);
  for (const bool moe : {false, true}) {
    if (!moe && bench.config.n_dense_layers == 0) continue;
    ModelConfig cached = bench.config;
    cached.n_layers = bench.options.layers;
    const ModelConfig config =
        only_layers(bench, moe, KvCache::bytes_for(cached, longest, cache_type));
    CpuWeights home(kernels, speed.team().topology());
    const ModelWeights weights = random_weights(
        config, bench.formats, [](const WeightSpec& spec) { return spec.use != WeightUse::kHead; },
        home, speed.team());
    CpuOps ops(kernels, config, most, speed.team());
    CpuExperts experts(kernels, config, weights, moe ? most : 1, speed.team());
    CpuDevice device(speed.team());
    StepRunner model({config, weights, device, ops, experts}, {most, 1}, AttentionForm::kAuto);
    KvCache cache(config, longest, cache_type);
    fill_with_random(cache, config);
    const std::vector<int32_t> pages = first_pages(pages_for(longest));
    const ModelOnGpu on_gpu(
        bench.gpus,
        {.config = config,
         .formats = bench.formats,
         .wanted = [](const WeightSpec& s) { return s.use != WeightUse::kHead; },
         .max_tokens = most,
         .context = longest},
        {most, 1}, longest);
    std::mt19937 rng(1);
    for (const int context : bench.options.contexts) {
      for (const int n : bench.options.tokens) {
        if (n > context) continue;
        LastTokens last(context, n, pages);
        last.tokens = random_tokens(n, config.vocab, rng);
        const CostOfParts cost =
            cost_of_layer(config, bench.formats, moe, context, n, size_of(cache_type));
        const Work work = {cost.sum(),
                           [&](int64_t) { model.forward(last.batch(), cache, {}); },
                           {cost.matrices, cost.experts, cost.attention}};
        Measured measured = measure(speed, peak, {&work, 1}, bench.options.seconds)[0];
        measured.seconds /= config.n_layers;
        measured.roofline_ratio *= config.n_layers;
        measured.unhidden_ratio *= config.n_layers;
        nlohmann::ordered_json row =
            new_row("layer", bench, format_name(bench.formats.experts), kernels, speed);
        row["what"] = moe ? "MoE layer" : "dense layer";
        row["tokens"] = n;
        row["context"] = context;
        GpuSeconds gpu;
        if (on_gpu.model())
          gpu.on_gpu = seconds_on_gpu(
                           *on_gpu.bench_model(),
                           [&](int64_t) { on_gpu.model()->forward(last.batch(), *on_gpu.cache()); },
                           bench.options.seconds) /
                       config.n_layers;
        add_fields(row, measured, peak, gpu);
        row["resident_experts"] = config.router.n_experts;
        row["resident_layers"] = config.n_layers;
        on_row(row);
      }
    }
  }
}

}  // namespace

Benchmark moe_benchmark() {
  using enum BenchFlag;
  return {.name = "moe",
          .help = "a MoE layer's feed-forward part: router, shared experts, routed experts",
          .examples = "  tandem bench moe --config v2-lite --layers 2 --tokens 1,64\n",
          .flags = {kConfig, kIsa, kTokens, kCsv, kPlot, kLayers, kExperts, kFormat, kActivations},
          .layers_help = "different ones that are walked through",
          .memory_part = 0.6,
          .on_cpu = bench_moe};
}

Benchmark layer_benchmark() {
  using enum BenchFlag;
  return {.name = "layer",
          .help = "whole layers, dense and MoE",
          .examples = "  tandem bench layer --config r1 --layers 3 --ctx 4096 --tokens 1,512\n",
          .flags = {kConfig, kIsa, kTokens, kCsv, kPlot, kLayers, kExperts, kFormat, kActivations,
                    kContexts, kSimulateRouting},
          .layers_help = "different ones that are walked through",
          .contexts = {4096},
          .memory_part = 0.6,
          .on_cpu = bench_layer};
}

}  // namespace tandem
