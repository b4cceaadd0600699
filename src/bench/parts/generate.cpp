// `tandem bench generate`: a reduced model with random weights, run end to end by the engine.
#include <algorithm>
#include <random>

#include "bench/benchmark.h"
#include "bench/costs.h"
#include "bench/cpu_bench_model.h"
#include "bench/prediction.h"
#include "bench/random_inputs.h"
#include "engine/completion.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kMinRounds = 3;
constexpr int kBurstsOfPrompt = 4;  // a median of three could follow a single disturbance
constexpr double kFirstBurst = 0.02;

int64_t longest_sequence(const BenchInput& bench) {
  return std::max(most_of(bench.options.contexts) + bench.options.new_tokens,
                  most_of(bench.options.tokens)) +
         1;
}

// For all sequences that decode concurrently, each with a page to spare: without it the engine does
// not let the last of them in.
int64_t cache_tokens(const BenchInput& bench) {
  const int64_t pages = pages_for(static_cast<int>(longest_sequence(bench))) + 1;
  return most_of(bench.options.batches) * pages * kPageSize;
}

std::unique_ptr<Engine> engine_for(StepRunner& model, KvCache& cache, const BenchInput& bench) {
  const int vocab = model.config().vocab;
  return std::make_unique<Engine>(model, cache, Vocabulary{vocab, {}}, longest_sequence(bench),
                                  Engine::Options{});
}

Request greedy(std::vector<int32_t> prompt, int n_new) {
  SamplingParams params;
  params.temperature = 0;
  return {.prompt = std::move(prompt), .max_new_tokens = n_new, .sampling = params, .stop_ids = {}};
}

// A step, or a prompt, with the bursts right before and after it.
struct TimedRun {
  double seconds;
  int first_burst, end_burst;
};

double median_seconds(const std::vector<TimedRun>& runs) {
  std::vector<double> seconds;
  for (const TimedRun& run : runs) seconds.push_back(run.seconds);
  return median(std::move(seconds));
}

// Times each step that decodes a token of each of `batch` sequences after `context` cached tokens,
// with bursts of the probe in between.
std::vector<TimedRun> decode_runs(Engine& engine, const BenchInput& bench, int context, int batch,
                                  RatesProbe& probe) {
  std::mt19937 rng(context);
  std::vector<TimedRun> runs;
  double spent = 0;
  for (int round = 0; round < kMinRounds || spent < bench.options.seconds; ++round) {
    int n_drawn = 0, n_ended = 0;
    const auto count = [&](const TokenEvent& event) {
      n_drawn += event.token.has_value();
      n_ended += event.finish.has_value();
      return true;
    };
    for (int i = 0; i < batch; ++i) {
      std::vector<int32_t> prompt = random_tokens(context, engine.vocabulary_size(), rng);
      engine.assume_cached(prompt);
      engine.submit(
          {.request = greedy(std::move(prompt), bench.options.new_tokens), .on_event = count});
    }
    while (n_drawn < batch) engine.step();
    probe.burst(kFirstBurst);
    while (n_ended < batch) {
      const double seconds = seconds_of([&] { engine.step(); });
      const int burst = probe.n_bursts();
      probe.burst(seconds);
      runs.push_back({seconds, burst - 1, burst + 1});
      spent += seconds;
    }
  }
  return runs;
}

std::vector<TimedRun> prefill_runs(Engine& engine, const BenchInput& bench, int n,
                                   RatesProbe& probe) {
  std::mt19937 rng(n);
  std::vector<TimedRun> runs;
  double spent = 0;
  int before = probe.n_bursts();
  probe.burst(kFirstBurst);
  for (int round = 0; round < kMinRounds || spent < bench.options.seconds; ++round) {
    const Request request = greedy(random_tokens(n, engine.vocabulary_size(), rng), 1);
    const double seconds = seconds_of([&] { complete(engine, {&request, 1}); });
    const int after = probe.n_bursts();
    for (int i = 0; i < kBurstsOfPrompt; ++i) probe.burst(seconds / kBurstsOfPrompt);
    runs.push_back({seconds, before, probe.n_bursts()});
    before = after;
    spent += seconds;
  }
  return runs;
}

// The bounds of a kind of product at the rates of `machine`.
Bounds bounds_of(const Machine& machine, const cpu::PeakLoop& peak) {
  const double ops = peak.type == cpu::Arithmetic::kInt8   ? machine.peak.int8
                     : peak.type == cpu::Arithmetic::kBF16 ? machine.peak.bf16
                                                           : machine.peak.fp32;
  return {machine.nodes[0].read_bytes_per_second, ops};
}

// Adds the planner's prediction and its relative error: the median over the runs, each compared
// with predict(machine) at the rates measured right before and after it.
template <class Predict>
void add_prediction(Json& row, const std::vector<TimedRun>& runs, const RatesProbe& probe,
                    const Predict& predict) {
  std::vector<double> ratios;
  for (const TimedRun& run : runs)
    ratios.push_back(predict(probe.machine(run.first_burst, run.end_burst)) / run.seconds);
  const double ratio = median(std::move(ratios));
  row["predicted_seconds"] = row["seconds"].get<double>() * ratio;
  row["prediction_error"] = ratio - 1;
}

// The share of the GPU's memory bandwidth that reading all bytes of a token takes.
void add_gpu_ratio(Json& row, const std::optional<Gpu>& gpu) {
  std::optional<double> ratio;
  if (gpu && row["gpu_tokens_per_second"].is_number())
    ratio = row["bytes_per_token"].get<double>() * row["gpu_tokens_per_second"].get<double>() /
            gpu->read_bytes_per_second;
  row["gpu_roofline_ratio"] = or_null(ratio);
}

// The model to run. Throws Error when layers, contexts or memory are insufficient.
ModelConfig cut_model(const BenchInput& bench) {
  const ModelConfig c = with_layers(bench.config, bench.options.layers);
  const int64_t cache = KvCache::bytes_for(c, cache_tokens(bench), DType::kBF16);
  const int64_t left = bench.memory_bytes - backbone_bytes(c, bench.formats) - cache;
  require(
      left > 0,
      "{} layers with a cache of {} tokens need {:.2f} GB without experts, and {:.2f} GB may be "
      "used; choose fewer --layers, a shorter --ctx or raise --memory",
      c.n_layers, cache_tokens(bench), gigabytes(bench.memory_bytes - left),
      gigabytes(bench.memory_bytes));
  return with_resident_experts(c, bench.formats.experts, left);
}

void bench_generate(const BenchInput& bench, const cpu::KernelTable& kernels, MachineSpeed& speed,
                    const OnRow& on_row) {
  const ModelConfig config = cut_model(bench);
  const StepLimits limits = {bench.step_tokens, most_of(bench.options.batches)};
  CpuBenchModel cpu(config, bench.formats, kernels, speed.team(), limits, cache_tokens(bench));
  fill_with_random(cpu.cache, config);
  const std::unique_ptr<Engine> engine = engine_for(cpu.model, cpu.cache, bench);
  const ModelOnGpu on_gpu(bench.gpus,
                          {.config = config,
                           .formats = bench.formats,
                           .wanted = [](const WeightSpec&) { return true; },
                           .max_tokens = bench.step_tokens,
                           .context = longest_sequence(bench)},
                          limits, cache_tokens(bench));
  std::unique_ptr<Engine> engine_there;
  if (on_gpu.model()) engine_there = engine_for(*on_gpu.model(), *on_gpu.cache(), bench);
  const auto per_second_there = [&](int n, const auto& runs_of) {
    if (!engine_there) return Json();
    return Json(n / median_seconds(runs_of(*engine_there)));
  };
  const cpu::PeakLoop products = peak_of_products(speed, kernels, bench.formats.experts.dtype);
  const cpu::PeakLoop attention = peak_of_attention(speed, kernels);
  RatesProbe probe(speed, kernels.isa, bench.curves);

  Json decode = Json::array();
  for (const int context : bench.options.contexts) {
    for (const int batch : bench.options.batches) {
      const int first_burst = probe.n_bursts();
      const std::vector<TimedRun> runs = decode_runs(*engine, bench, context, batch, probe);
      const double seconds = median_seconds(runs);
      const Machine machine = probe.machine(first_burst, probe.n_bursts());
      const CostOfParts cost =
          cost_of_step(config, bench.formats, context, batch, size_of(cache_type_for(kernels)));
      const Bounds bounds = bounds_of(machine, products);
      const double roofline = bounds.seconds(cost.matrices) + bounds.seconds(cost.experts) +
                              bounds_of(machine, attention).seconds(cost.attention);
      const double reading = static_cast<double>(cost.sum().bytes) / bounds.read_bytes_per_second;
      decode.push_back({{"context", context},
                        {"batch", batch},
                        {"seconds", seconds},
                        {"tokens_per_second", batch / seconds},
                        {"bytes_per_token", cost.sum().bytes / batch},
                        {"roofline_seconds", roofline},
                        {"roofline_ratio", roofline / seconds},
                        {"bandwidth_ratio", reading / seconds},
                        {"gpu_tokens_per_second", per_second_there(batch, [&](Engine& there) {
                           return decode_runs(there, bench, context, batch, probe);
                         })}});
      add_prediction(decode.back(), runs, probe, [&](const Machine& rates) {
        return StepPrediction(config, bench.formats, rates).decode_seconds(batch, context);
      });
      add_gpu_ratio(decode.back(), bench.gpu);
    }
  }
  Json prefill = Json::array();
  for (const int n : bench.options.tokens) {
    const std::vector<TimedRun> runs = prefill_runs(*engine, bench, n, probe);
    const double seconds = median_seconds(runs);
    prefill.push_back({{"tokens", n},
                       {"seconds", seconds},
                       {"tokens_per_second", n / seconds},
                       {"gpu_tokens_per_second", per_second_there(n, [&](Engine& there) {
                          return prefill_runs(there, bench, n, probe);
                        })}});
    add_prediction(prefill.back(), runs, probe, [&](const Machine& rates) {
      return StepPrediction(config, bench.formats, rates).prefill_seconds(n, bench.step_tokens);
    });
  }

  const Bounds bounds = bounds_of(probe.machine(0, probe.n_bursts()), products);
  Json report = {{"bench", "generate"}, {"config", bench.options.config}};
  add_cut_model(report, kernels.name, speed.team().size(), config, bench.formats);
  report.update({{"prefill_tokens_per_second", prefill.back()["tokens_per_second"]},
                 {"decode_tokens_per_second", decode[0]["tokens_per_second"]},
                 {"gpu_prefill_tokens_per_second", prefill.back()["gpu_tokens_per_second"]},
                 {"gpu_decode_tokens_per_second", decode[0]["gpu_tokens_per_second"]},
                 {"bytes_per_token", decode[0]["bytes_per_token"]},
                 {"roofline_ratio", decode[0]["roofline_ratio"]},
                 {"bandwidth_ratio", decode[0]["bandwidth_ratio"]},
                 {"read_bytes_per_second", bounds.read_bytes_per_second},
                 {"peak_ops_per_second", bounds.ops_per_second},
                 {"instruction", products.instruction},
                 {"decode", decode},
                 {"prefill", prefill}});
  on_row(report);
}

std::string generate_text(const Json& r) {
  std::string text = fmt::format(
      "{} cut to {} layers ({} dense), {} of its experts a layer, experts {}, other matrices {}\n"
      "{}, {} threads{}; measured beside it: reading {:.1f} GB/s, {} {:.0f} Gop/s\n"
      "{:<10}{:>9}{:>7}{:>11}{:>11}{:>8}{:>11}{:>11}{:>10}{:>11}\n",
      r["config"].get<std::string>(), r["layers"].get<int>(), r["dense_layers"].get<int>(),
      r["resident_experts"].get<int>(), r["experts"].get<std::string>(),
      r["format"].get<std::string>(), r["isa"].get<std::string>(), r["threads"].get<int>(),
      simulated_routing_text(r), r["read_bytes_per_second"].get<double>() * 1e-9,
      r["instruction"].get<std::string>(), r["peak_ops_per_second"].get<double>() * 1e-9, "",
      "tokens", "batch", "ms", "predicted", "off", "tokens/s", "GB/token", "roofline", "bandwidth");
  for (const Json& d : r["decode"])
    text += fmt::format(
        "{:<10}{:>9}{:>7}{:>11.2f}{:>11.2f}{:>6.0f} %{:>11.2f}{:>11.3f}{:>8.0f} %{:>9.0f} %\n",
        "decode", d["context"].get<int>(), d["batch"].get<int>(), d["seconds"].get<double>() * 1e3,
        d["predicted_seconds"].get<double>() * 1e3, d["prediction_error"].get<double>() * 100,
        d["tokens_per_second"].get<double>(), d["bytes_per_token"].get<double>() * 1e-9,
        d["roofline_ratio"].get<double>() * 100, d["bandwidth_ratio"].get<double>() * 100);
  for (const Json& p : r["prefill"])
    text += fmt::format("{:<10}{:>9}{:>7}{:>11.2f}{:>11.2f}{:>6.0f} %{:>11.2f}\n", "prefill",
                        p["tokens"].get<int>(), 1, p["seconds"].get<double>() * 1e3,
                        p["predicted_seconds"].get<double>() * 1e3,
                        p["prediction_error"].get<double>() * 100,
                        p["tokens_per_second"].get<double>());
  return text;
}

void check_new_tokens(const BenchOptions& o) {
  require(o.new_tokens >= 2 && o.new_tokens <= kMaxTokens, "-n {}: must be between 2 and {}",
          o.new_tokens, kMaxTokens);
}

}  // namespace

Benchmark generate_benchmark() {
  using enum BenchFlag;
  return {
      .name = "generate",
      .help = "a cut model with random weights, end to end",
      .examples = "  tandem bench generate --config r1 --layers 5 --experts fp8 --ctx 1024,16384\n",
      .flags = {kConfig, kIsa, kContexts, kTokens, kBatches, kLayers, kExperts, kFormat,
                kActivations, kNewTokens, kSimulateRouting},
      .tokens_help = "lengths of prompts, a list",
      .tokens = {64, 512},
      .contexts = {1024, 8192},
      .batches = {1},
      .memory_part = 0.6,
      .check = check_new_tokens,
      .check_input = [](const BenchInput& bench) { cut_model(bench); },
      .on_cpu = bench_generate,
      .header = nullptr,
      .text = generate_text};
}

}  // namespace tandem
