// `tandem bench hybrid`: steps shared by a GPU and the CPU, of a reduced model with random weights.
#include <algorithm>

#include "bench/gpu/gpu_benches.h"
#include "bench/prediction.h"
#include "io/json.h"
#include "loader/gpu_model.h"
#include "loader/loaded_model.h"
#include "model/cost.h"
#include "model/parameters.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kBurst = 0.02;

// Null where the GPU's rates are unknown.
void add_prediction(Json& row, const std::optional<double>& predicted) {
  row["predicted_seconds"] = predicted ? Json(*predicted) : Json();
  row["prediction_error"] =
      predicted ? Json(*predicted / row["seconds"].get<double>() - 1) : Json();
}

// The GPU's part of a step at its own rates: matrices, then the cache. Logits are not computed.
double backbone_seconds(const HybridBench& bench, const ModelConfig& config, int context, int n) {
  const Bounds gpu = {bench.rates->read_bytes_per_second, bench.rates->peak.bf16};
  CostOfParts cost = cost_of_step(config, bench.input.formats, {context, n}, size_of(DType::kBF16));
  cost.matrices.bytes -= matrix_bytes(config, config.vocab, config.dim, {DType::kBF16});
  cost.matrices.ops -= 2 * int64_t{n} * config.vocab * config.dim;
  return gpu.seconds(cost.matrices) + gpu.seconds(cost.attention);
}

Json way_row(const HandOffs::Way& way) {
  return {{"recorded_seconds", or_null(way.recorded)},
          {"enqueued_seconds", or_null(way.enqueued)},
          {"why_not", way.why_not}};
}

Json prefill_row(const HybridSteps::Prefill& p, int n) {
  const double brought = static_cast<double>(p.bytes) / p.streamed;
  return {{"tokens", n},
          {"seconds", p.streamed},
          {"tokens_per_second", n / p.streamed},
          {"cpu_experts_seconds", p.on_cpu},
          {"bytes_brought", p.bytes},
          {"bytes_per_second", brought},
          {"copy_bytes_per_second", p.copy_bytes_per_second},
          {"link_ratio", brought / p.copy_bytes_per_second},
          {"crossover_tokens", p.crossover}};
}

std::string ms(const Json& seconds) {
  return seconds.is_null() ? "-" : fmt::format("{:.3f}", seconds.get<double>() * 1e3);
}
std::string percent(const Json& part) {
  return part.is_null() ? "-" : fmt::format("{:.0f} %", part.get<double>() * 100);
}
std::string fold(const Json& factor) {
  return factor.is_null() ? "-" : fmt::format("{:.2f} x", factor.get<double>());
}

}  // namespace

Json decode_row(const HybridSteps::Decode& m, const HybridBench& bench, const ModelConfig& config,
                int context, int n) {
  std::optional<double> bound, gaps, roofline, predicted, idle;
  if (bench.rates) bound = backbone_seconds(bench, config, context, n);
  if (bench.kernel_gap && m.gpu_nodes > 0) gaps = *bench.kernel_gap * m.gpu_nodes;
  if (bound) roofline = *bound / m.gpu;
  if (bound && gaps) predicted = *bound + *gaps;
  if (gaps) idle = *gaps / m.gpu;
  return {{"context", context},
          {"batch", n},
          {"seconds", m.step},
          {"tokens_per_second", n / m.step},
          {"gpu_seconds", m.gpu},
          {"cpu_seconds", m.cpu},
          {"over_larger_part", m.step / std::max(m.gpu, m.cpu)},
          {"halves_seconds", n > 1 ? Json(m.halves) : Json()},
          {"halves_gain", n > 1 ? Json(m.step / m.halves) : Json()},
          {"hand_off_seconds", (m.no_cpu - m.gpu) / moe_layers(config)},
          {"gpu_roofline_ratio", or_null(roofline)},
          {"gpu_predicted_seconds", or_null(predicted)},
          {"gpu_nodes", m.gpu_nodes},
          {"gpu_early_nodes", m.gpu_early},
          {"gpu_idle_share", or_null(idle)}};
}

Json bench_hybrid(const HybridBench& bench, const cpu::KernelTable& kernels, MachineSpeed& speed) {
  const ModelConfig config =
      with_resident_experts(with_layers(bench.input.config, bench.input.options.layers),
                            bench.input.formats.experts, bench.input.memory_bytes);
  require(moe_layers(config) > 0, "--layers {}: the first layer is dense, choose at least 2",
          bench.input.options.layers);
  CpuWeights home(kernels, speed.team().topology());
  const ModelWeights weights = random_weights(
      config, bench.input.formats,
      [](const WeightSpec& spec) { return spec.use == WeightUse::kExpert; }, home, speed.team());
  const StepLimits limits = {
      std::max(most_of(bench.input.options.batches), most_of(bench.input.options.tokens)), 1};
  CpuExperts experts(kernels, config, weights, limits.max_tokens, speed.team());
  const int longest =
      std::max(most_of(bench.input.options.contexts), most_of(bench.input.options.tokens));
  const ModelOnGpu gpu_model(
      bench.input.gpus,
      {.config = config,
       .formats = {bench.input.formats.backbone, bench.input.formats.backbone},
       .wanted =
           [](const WeightSpec& s) {
             return s.use != WeightUse::kExpert && s.use != WeightUse::kHead;
           },
       .max_tokens = limits.max_tokens,
       .context = longest},
      limits, int64_t{most_of(bench.input.options.batches)} * pages_for(longest) * kPageSize);
  require(gpu_model.model() != nullptr,
          "{} layers without routed experts, and the caches, do not fit {}: choose fewer --layers, "
          "a shorter --ctx or a smaller --batch",
          config.n_layers, bench.gpu_name);
  HybridSteps steps({config, experts, gpu_model, limits, bench.before_cpu});

  RatesProbe probe(speed, kernels.isa, bench.input.curves);
  // Returns the result of measure(), and a prediction with the CPU rates measured around it.
  const auto with_prediction = [&](const auto& measure) {
    const int first = probe.n_bursts();
    if (bench.rates) probe.burst(kBurst);
    const auto measured = measure();
    std::optional<StepPrediction> prediction;
    if (bench.rates) {
      probe.burst(kBurst);
      Machine machine = probe.machine(first, probe.n_bursts());
      machine.gpus = {*bench.rates};
      prediction.emplace(config, bench.input.formats, machine);
    }
    return std::pair(measured, std::move(prediction));
  };
  Json decode = Json::array(), prefill = Json::array();
  for (const int context : bench.input.options.contexts)
    for (const int n : bench.input.options.batches) {
      auto [measured, prediction] =
          with_prediction([&] { return steps.decode(context, n, bench.input.options.seconds); });
      std::optional<double> one;
      if (prediction) one = prediction->shared_decode_seconds(n, context);
      decode.push_back(decode_row(measured, bench, config, context, n));
      add_prediction(decode.back(), one);
    }
  for (const int n : bench.input.options.tokens) {
    auto [measured, prediction] =
        with_prediction([&] { return steps.prefill(n, bench.input.options.seconds); });
    if (!measured) break;
    std::optional<double> streamed;
    if (prediction) streamed = prediction->streamed_seconds(n);
    prefill.push_back(prefill_row(*measured, n));
    add_prediction(prefill.back(), streamed);
  }
  Json report = {
      {"bench", "hybrid"}, {"config", bench.input.options.config}, {"card", bench.gpu_name}};
  add_cut_model(report, kernels.name, speed.team().size(), config, bench.input.formats);
  report["gpu_kernel_gap_seconds"] = or_null(bench.kernel_gap);
  report["decode"] = decode;
  report["prefill"] = prefill;
  return report;
}

namespace {

std::string steps_text(const Json& r) {
  std::string text = fmt::format(
      "{} cut to {} layers ({} dense), {} of its experts a layer, experts {} on {} threads ({}), "
      "the rest {} on {}\n",
      r["config"].get<std::string>(), r["layers"].get<int>(), r["dense_layers"].get<int>(),
      r["resident_experts"].get<int>(), r["experts"].get<std::string>(), r["threads"].get<int>(),
      r["isa"].get<std::string>(), r["format"].get<std::string>(), r["card"].get<std::string>());
  text += fmt::format(
      "\n{:>8}{:>7}{:>11}{:>11}{:>11}{:>12}{:>15}{:>8}{:>16}{:>14}{:>7}{:>14}{:>10}{:>12}\n",
      "context", "batch", "step ms", "GPU alone", "CPU alone", "/ larger", "two parts ms", "gain",
      "hand-off us", "predicted ms", "off", "GPU roofline", "GPU idle", "GPU by sum");
  for (const Json& d : r["decode"])
    text += fmt::format(
        "{:>8}{:>7}{:>11}{:>11}{:>11}{:>12}{:>15}{:>8}{:>16.1f}{:>14}{:>7}{:>14}{:>10}{:>12}\n",
        d["context"].get<int>(), d["batch"].get<int>(), ms(d["seconds"]), ms(d["gpu_seconds"]),
        ms(d["cpu_seconds"]), fold(d["over_larger_part"]), ms(d["halves_seconds"]),
        fold(d["halves_gain"]), d["hand_off_seconds"].get<double>() * 1e6,
        ms(d["predicted_seconds"]), percent(d["prediction_error"]),
        percent(d["gpu_roofline_ratio"]), percent(d["gpu_idle_share"]),
        ms(d["gpu_predicted_seconds"]));
  if (r["prefill"].empty()) return text;
  text += fmt::format("\n{:>8}{:>14}{:>16}{:>11}{:>11}{:>9}{:>11}{:>14}{:>7}\n", "prompt",
                      "streamed ms", "CPU experts ms", "GB/s", "copy GB/s", "of it", "crossover",
                      "predicted ms", "off");
  for (const Json& p : r["prefill"])
    text += fmt::format("{:>8}{:>14}{:>16}{:>11.2f}{:>11.2f}{:>9}{:>11}{:>14}{:>7}\n",
                        p["tokens"].get<int>(), ms(p["seconds"]), ms(p["cpu_experts_seconds"]),
                        p["bytes_per_second"].get<double>() * 1e-9,
                        p["copy_bytes_per_second"].get<double>() * 1e-9, percent(p["link_ratio"]),
                        p["crossover_tokens"].get<int>(), ms(p["predicted_seconds"]),
                        percent(p["prediction_error"]));
  return text;
}

}  // namespace

Json hand_off_row(const HandOffs& m, const std::string& gpu_name) {
  return {{"bench", "hand-off"},
          {"card", gpu_name},
          {"kernels", way_row(m.kernels)},
          {"memory_operations", way_row(m.memory_operations)}};
}

namespace {

std::string hand_off_text(const Json& row) {
  const auto us = [](const Json& seconds) {
    return seconds.is_null() ? "refused" : fmt::format("{:.2f}", seconds.get<double>() * 1e6);
  };
  std::string text =
      fmt::format("\n{:>26}{:>12}{:>12}\n", "hand-off alone, us", "recorded", "one by one");
  for (const char* way : {"kernels", "memory_operations"})
    text += fmt::format("{:>26}{:>12}{:>12}\n", way, us(row[way]["recorded_seconds"]),
                        us(row[way]["enqueued_seconds"]));
  return text;
}

std::string hybrid_text(const Json& row) {
  return row["bench"] == "hand-off" ? hand_off_text(row) : steps_text(row);
}

void check_gpu(const BenchOptions& o) {
  require_list("--tokens", o.tokens, kStepTokens);
  const std::string why_not = why_no_gpu();
  require(why_not.empty(), "bench hybrid needs a GPU: {}", why_not);
}

void bench_steps_and_hand_offs(const BenchInput& bench, const cpu::KernelTable& kernels,
                               MachineSpeed& speed, const OnRow& on_row) {
  const std::string& gpu_name = bench.gpu->name;
  on_row(bench_hybrid({.input = bench,
                       .gpu_name = gpu_name,
                       .rates = bench.gpu,
                       .kernel_gap = measured_kernel_gap(kGpuSeconds)},
                      kernels, speed));
  on_row(hand_off_row(measured_hand_offs(kGpuSeconds), gpu_name));
}

}  // namespace

Benchmark hybrid_benchmark() {
  using enum BenchFlag;
  return {.name = "hybrid",
          .help = "steps that a GPU and the CPU share, beside what each takes alone",
          .examples = "  tandem bench hybrid --config r1 --layers 5 --batch 1,8,32 --ctx 4096\n",
          .flags = {kConfig, kIsa, kContexts, kTokens, kBatches, kLayers, kExperts, kFormat},
          .tokens_help = "tokens of steps that stream experts to the GPU, a list",
          .tokens = {kStepTokens},
          .contexts = {4096},
          .batches = {1, 8, 16, 32},
          .memory_part = 0.6,
          .all_gpu_rates = true,
          .check = check_gpu,
          .on_cpu = bench_steps_and_hand_offs,
          .header = nullptr,
          .text = hybrid_text};
}

}  // namespace tandem
