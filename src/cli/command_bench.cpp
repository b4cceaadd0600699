// tandem bench: measures this machine and the engine's kernels on it.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "bench/attention_bench.h"
#include "bench/embed_bench.h"
#include "bench/experts_bench.h"
#include "bench/generate_bench.h"
#include "bench/gpu_benches.h"
#include "bench/hybrid_bench.h"
#include "bench/layer_bench.h"
#include "bench/machine_bench.h"
#include "bench/measured_curves.h"
#include "bench/mlp_bench.h"
#include "bench/row_text.h"
#include "cli/bench_options.h"
#include "cli/console.h"
#include "cli/options.h"
#include "cli/this_machine.h"
#include "core/machine_info.h"
#include "io/json.h"
#include "io/machine_json.h"
#include "loader/gpu_model.h"

namespace tandem {
namespace {

// Fractions of the free memory that weights may take.
constexpr double kExpertsPart = 0.4, kModelPart = 0.6;

int64_t memory_for_weights(const BenchOptions& b, double part) {
  return b.memory_gb > 0
             ? static_cast<int64_t>(b.memory_gb * 1e9)
             : static_cast<int64_t>(part * static_cast<double>(available_memory_bytes()));
}

int64_t memory_for_reading(const BenchOptions& b, const Team& team) {
  const int64_t enough = MachineSpeed::enough_bytes(team);
  return b.memory_gb > 0 ? std::min(enough, static_cast<int64_t>(b.memory_gb * 1e9)) : enough;
}

// What every kernel measurement needs. The constructor checks options before anything is measured.
struct Bench {
  explicit Bench(const Options& o)
      : options(o.bench),
        config(bench_config(o.bench.config)),
        kernels(cpu::kernels_for(o.model.isa ? *o.model.isa : default_isa())),
        team(o.model.n_threads) {}
  MachineSpeed speed() { return {team, memory_for_reading(options, team)}; }

  const BenchOptions& options;
  const ModelConfig config;
  const cpu::KernelTable kernels;
  Team team;
};

// True if --activations is fp8; throws Error unless a GPU supports it.
bool with_fp8_activations(const Options& options) {
  const bool fp8 = options.model.fp8_activations;
  if (fp8) require_fp8_gpu();
  return fp8;
}

// The GPU's memory bandwidth and its BF16 or FP8 peak, as its kernels multiply. Empty without a
// GPU.
std::optional<Bounds> gpu_bounds(bool fp8) {
  if (!gpu_bench_models()) return {};
  const Gpu gpu = measured_gpu_bounds(kGpuSeconds, fp8);
  return Bounds{gpu.read_bytes_per_second, fp8 ? gpu.peak.fp8 : gpu.peak.bf16};
}

void require_fp8(const WeightFormat& format) {
  require(format.dtype == DType::kF8E4M3,
          "--activations fp8: weights are {}: leave it out, or use a model or --format in FP8",
          format_name(format));
}

// Records --activations in the row unless it is the default.
void name_activations(const Options& options, nlohmann::ordered_json& row) {
  if (options.model.fp8_activations) row["gpu_activations"] = "fp8";
}

// Prints rows as they arrive and plots them all at the end.
class Rows {
 public:
  Rows(const Options& o, std::optional<Bounds> gpu) : options_(o), gpu_(gpu) {
    if (o.bench.plot.empty()) return;
    plot_.open(o.bench.plot);
    require(plot_.is_open(), "--plot {}: cannot be written", o.bench.plot);
  }
  OnRow printer() {
    return [this](nlohmann::ordered_json row) {
      row["gpu_roofline_ratio"] = gpu_ratio(row);
      name_activations(options_, row);
      const bool first = rows_.empty();
      const std::string text = options_.json ? row.dump() + "\n"
                               : options_.bench.csv
                                   ? (first ? csv_header(row) : "") + csv_text(row)
                                   : (first ? row_header(row) : "") + row_text(row);
      std::fputs(text.c_str(), stdout);
      std::fflush(stdout);
      rows_.push_back(row);
    };
  }
  int finish() {
    if (!options_.bench.plot.empty()) {
      plot_ << rows_chart(rows_);
      require(plot_.flush().good(), "--plot {}: cannot be written", options_.bench.plot);
    }
    return 0;
  }

 private:
  nlohmann::ordered_json gpu_ratio(const nlohmann::ordered_json& row) const {
    if (!gpu_ || row["gpu_seconds"].is_null()) return {};
    return gpu_->seconds({row["bytes"], row["ops"]}) / row["gpu_seconds"].get<double>();
  }

  const Options& options_;
  const std::optional<Bounds> gpu_;
  std::ofstream plot_;
  std::vector<nlohmann::ordered_json> rows_;
};

const std::vector<int> kEveryPower = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048};

struct LayersOf {
  const Options& options;
  LayerBench operator()(const ModelConfig& config) const {
    const BenchOptions& b = options.bench;
    const bool fp8 = with_fp8_activations(options);
    const WeightFormats formats = {backbone_format(b.format, config),
                                   expert_format(b.experts, config)};
    if (fp8) require_fp8(formats.backbone);
    return {.config_name = b.config,
            .config = config,
            .n_layers = b.layers,
            .formats = formats,
            .contexts = list_or(b.contexts, {4096}),
            .tokens = list_or(b.tokens, kEveryPower),
            .seconds = b.seconds,
            .memory_bytes = memory_for_weights(b, kModelPart),
            .gpus = gpu_bench_models(fp8)};
  }
};

// All options, including those read by what_of(config), are checked before anything is measured.
template <class WhatOf, class Measure>
int print_rows(const Options& options, WhatOf what_of, Measure measure) {
  require_sane(options.bench);
  const std::optional<Bounds> gpu = gpu_bounds(with_fp8_activations(options));
  // Created after the driver's threads, which would otherwise inherit the team's pinned core.
  Bench bench(options);
  const auto what = what_of(bench.config);
  Rows rows(options, gpu);
  MachineSpeed speed = bench.speed();
  measure(what, bench.kernels, speed, rows.printer());
  return rows.finish();
}

// The curves that `tandem plan` uses as well.
std::vector<EfficiencyCurve> saved_curves(const cpu::KernelTable& kernels) {
  const std::optional<Machine> saved = saved_this_machine();
  if (!saved || saved->isa != kernels.name || saved->cpu != machine_info().cpu) return {};
  return saved->curves;
}

}  // namespace

int bench_machine_command(const Options& options) {
  constexpr int64_t kMaxRowsBytes = 64 << 20;
  require_sane(options.bench);
  const std::string& rows = options.bench.curves;
  std::vector<EfficiencyCurve> curves;
  if (!rows.empty())
    curves =
        measured_curves(read_text_file(rows, kMaxRowsBytes), rows, cpu::name_of(cpu::best_isa()));
  nlohmann::ordered_json report =
      measure_this_machine({.n_threads = options.model.n_threads,
                            .seconds = options.bench.seconds,
                            .memory_bytes = static_cast<int64_t>(options.bench.memory_gb * 1e9),
                            .disk = options.bench.disk});
  if (!curves.empty()) report["efficiency"] = curves_to_json(curves);
  if (!save_this_machine(report))
    fmt::print(stderr, "warning: cannot keep the measurement in {}\n", this_machine_path());
  const std::string text = options.json ? report.dump() + "\n" : machine_text(report);
  std::fputs(text.c_str(), stdout);
  return 0;
}

int bench_experts_command(const Options& options) {
  const BenchOptions& b = options.bench;
  const auto what = [&](const ModelConfig& config) {
    const WeightFormat format = expert_format(b.experts, config);
    const int64_t memory = memory_for_weights(b, kExpertsPart);
    resident_experts(config, format, memory, cold_bytes());
    return ExpertsBench{.config_name = b.config,
                        .config = config,
                        .format = format,
                        .tokens = list_or(b.tokens, kEveryPower),
                        .skew = b.skew,
                        .seconds = b.seconds,
                        .memory_bytes = memory,
                        .gpus = gpu_bench_models(),
                        .progress = show_measuring};
  };
  return print_rows(options, what, bench_experts);
}

int bench_embed_command(const Options& options) {
  const BenchOptions& b = options.bench;
  const auto what = [&](const ModelConfig& config) {
    return EmbedBench{.config_name = b.config,
                      .config = config,
                      .tokens = list_or(b.tokens, kEveryPower),
                      .seconds = b.seconds,
                      .memory_bytes = memory_for_weights(b, kExpertsPart),
                      .gpus = gpu_bench_models()};
  };
  return print_rows(options, what, bench_embed);
}

int bench_moe_command(const Options& options) {
  return print_rows(options, LayersOf{options}, bench_moe);
}

int bench_layer_command(const Options& options) {
  return print_rows(options, LayersOf{options}, bench_layer);
}

int bench_mlp_command(const Options& options) {
  const BenchOptions& b = options.bench;
  const auto what = [&](const ModelConfig& config) {
    const bool fp8 = with_fp8_activations(options);
    const WeightFormat format = backbone_format(b.format, config);
    if (fp8) require_fp8(format);
    return MlpBench{.config_name = b.config,
                    .config = config,
                    .format = format,
                    .tokens = list_or(b.tokens, kEveryPower),
                    .seconds = b.seconds,
                    .memory_bytes = memory_for_weights(b, kExpertsPart),
                    .gpus = gpu_bench_models(fp8)};
  };
  return print_rows(options, what, bench_mlp);
}

int bench_attention_command(const Options& options) {
  const BenchOptions& b = options.bench;
  require(!b.variants || b.batches.empty(),
          "--variants are of one sequence's token: leave --batch out");
  const auto what = [&](const ModelConfig& config) {
    return AttentionBench{.config_name = b.config,
                          .config = config,
                          .contexts = list_or(b.contexts, {512, 4096, 16384}),
                          .prompt_tokens = list_or(b.tokens, kEveryPower),
                          .batches = list_or(b.batches, {1}),
                          .seconds = b.seconds,
                          .memory_bytes = memory_for_weights(b, kExpertsPart),
                          .gpus = gpu_bench_models()};
  };
  return print_rows(options, what, b.variants ? bench_attention_variants : bench_attention);
}

int bench_generate_command(const Options& options) {
  const BenchOptions& b = options.bench;
  require_sane(b);
  require(b.new_tokens >= 2 && b.new_tokens <= kMaxTokens, "-n {}: must be between 2 and {}",
          b.new_tokens, kMaxTokens);
  const bool fp8 = with_fp8_activations(options);
  const std::optional<Bounds> gpu = gpu_bounds(fp8);
  Bench bench(options);
  const WeightFormats formats = {backbone_format(b.format, bench.config),
                                 expert_format(b.experts, bench.config)};
  if (fp8) require_fp8(formats.backbone);
  const GenerateBench what = {.config_name = b.config,
                              .config = bench.config,
                              .n_layers = b.layers,
                              .formats = formats,
                              .contexts = list_or(b.contexts, {1024, 8192}),
                              .batches = list_or(b.batches, {1}),
                              .prompts = list_or(b.tokens, {64, kStepTokens}),
                              .new_tokens = b.new_tokens,
                              .step_tokens = kStepTokens,
                              .seconds = b.seconds,
                              .memory_bytes = memory_for_weights(b, kModelPart),
                              .gpus = gpu_bench_models(fp8),
                              .curves = saved_curves(bench.kernels)};
  cut_model(what);
  MachineSpeed speed = bench.speed();
  nlohmann::ordered_json report = bench_generate(what, bench.kernels, speed);
  for (auto& row : report["decode"])
    row["gpu_roofline_ratio"] =
        gpu && row["gpu_tokens_per_second"].is_number()
            ? nlohmann::ordered_json(row["bytes_per_token"].get<double>() *
                                     row["gpu_tokens_per_second"].get<double>() /
                                     gpu->read_bytes_per_second)
            : nlohmann::ordered_json();
  name_activations(options, report);
  const std::string text = options.json ? report.dump() + "\n" : generate_text(report);
  std::fputs(text.c_str(), stdout);
  return 0;
}

int bench_hybrid_command(const Options& options) {
  const BenchOptions& b = options.bench;
  require_sane(b);
  require_list("--tokens", b.tokens, kStepTokens);
  const std::string why_not = why_no_gpu();
  require(why_not.empty(), "bench hybrid needs a GPU: {}", why_not);
  const Gpu gpu = measured_gpu(kGpuSeconds);
  // Created after the driver's threads, which would otherwise inherit the team's pinned core.
  Bench bench(options);
  const HybridBench what = {
      .config_name = b.config,
      .gpu_name = gpu.name,
      .config = bench.config,
      .n_layers = b.layers,
      .formats = {backbone_format(b.format, bench.config), expert_format(b.experts, bench.config)},
      .contexts = list_or(b.contexts, {4096}),
      .batches = list_or(b.batches, {1, 8, 16, 32}),
      .prompts = list_or(b.tokens, {kStepTokens}),
      .seconds = b.seconds,
      .memory_bytes = memory_for_weights(b, kModelPart),
      .gpus = gpu_bench_models(),
      .curves = saved_curves(bench.kernels),
      .rates = gpu,
      .kernel_gap = measured_kernel_gap(kGpuSeconds)};
  MachineSpeed speed = bench.speed();
  const auto print = [&](const nlohmann::ordered_json& report,
                         std::string (*text)(const nlohmann::ordered_json&)) {
    std::fputs((options.json ? report.dump() + "\n" : text(report)).c_str(), stdout);
    std::fflush(stdout);
  };
  print(bench_hybrid(what, bench.kernels, speed), hybrid_text);
  print(hand_off_row(measured_hand_offs(kGpuSeconds), gpu.name), hand_off_text);
  return 0;
}

}  // namespace tandem
