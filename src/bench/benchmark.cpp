#include "bench/benchmark.h"

#include <algorithm>

#include "bench/gpu/gpu_benches.h"
#include "bench/machine/this_machine.h"
#include "core/machine_info.h"
#include "io/json.h"
#include "loader/loaded_model.h"
#include "model/cost.h"

namespace tandem {

std::span<const Benchmark> all_benchmarks() {
  static const std::vector<Benchmark> all = {
      machine_benchmark(),  embed_benchmark(),     experts_benchmark(),  mlp_benchmark(),
      head_benchmark(),     attention_benchmark(), moe_benchmark(),      layer_benchmark(),
      generate_benchmark(), kernels_benchmark(),   products_benchmark(), hybrid_benchmark(),
      comm_benchmark(),     overlap_benchmark()};
  return all;
}

void require_list(const char* option, const std::vector<int>& values, int most) {
  for (const int n : values)
    require(n >= 1 && n <= most, "{} {}: must be between 1 and {}", option, n, most);
}

namespace {

void check_options(const BenchOptions& o) {
  constexpr int kMaxContext = 1 << 24;
  require(o.seconds > 0 && o.seconds <= 3600, "--seconds {}: must be above 0 and at most 3600",
          o.seconds);
  const double free_gb = gigabytes(available_memory_bytes());
  require(o.memory_gb >= 0 && o.memory_gb <= free_gb,
          "--memory {}: must be between 0 and the {:.1f} GB that are free", o.memory_gb, free_gb);
  require_list("--tokens", o.tokens, kMaxTokens);
  require_list("--ctx", o.contexts, kMaxContext);
  require_list("--batch", o.batches, kStepTokens);
  require(o.context_limit >= 0 && o.context_limit <= kMaxContext,
          "--context-limit {}: must be between 0 and {}", o.context_limit, kMaxContext);
  for (const int n : o.draft_tokens)
    require(n >= 0 && n <= kMaxDraftTokens, "--draft-tokens {}: must be between 0 and {}", n,
            kMaxDraftTokens);
  require(o.baseline.empty() || o.baseline == "torch", "--baseline {}: must be torch", o.baseline);
  require(!o.format || (o.format->dtype != DType::kI8 && !is_i4(o.format->dtype)),
          "--format {}: integers are for routed experts alone, see --experts",
          o.format ? format_name(*o.format) : "");
}

bool takes(const Benchmark& benchmark, BenchFlag flag) {
  return std::find(benchmark.flags.begin(), benchmark.flags.end(), flag) != benchmark.flags.end();
}

// Everything but the measured rates.
BenchInput input_for(const Benchmark& benchmark, BenchOptions o) {
  const auto or_default = [](std::vector<int>& given, const std::vector<int>& usual) {
    if (given.empty()) given = usual;
  };
  BenchInput input;
  const bool fp8 = o.fp8_activations;
  if (fp8) require_fp8_gpu();
  // Ranks choose their GPUs when they are measured.
  if (o.device != DeviceChoice::kCpu && !benchmark.on_ranks) input.gpus = gpu_bench_models(fp8);
  require(input.gpus || o.device != DeviceChoice::kCuda || benchmark.on_ranks,
          "--device cuda: there is no GPU to measure");
  const bool measures_cpu = !benchmark.cpu_tokens.empty() && !input.gpus;
  or_default(o.tokens, measures_cpu ? benchmark.cpu_tokens : benchmark.tokens);
  or_default(o.contexts, benchmark.contexts);
  or_default(o.batches, benchmark.batches);
  if (!o.isa) o.isa = default_isa();
  input.config = bench_config(o.config);
  require_sound(o.simulated_routing, input.config);
  input.formats = {o.format.value_or(stored_format(input.config)),
                   o.experts.value_or(stored_expert_format(input.config))};
  require(!fp8 || input.formats.backbone.dtype == DType::kF8E4M3,
          "--activations fp8: weights are {}: leave it out, or use a model or --format in FP8",
          format_name(input.formats.backbone));
  input.memory_bytes = static_cast<int64_t>(
      o.memory_gb > 0 ? o.memory_gb * 1e9
                      : benchmark.memory_part * static_cast<double>(available_memory_bytes()));
  input.step_tokens = kStepTokens;
  input.options = std::move(o);
  return input;
}

// The curves that `tandem plan` uses as well.
std::vector<EfficiencyCurve> saved_curves(const cpu::KernelTable& kernels) {
  const std::optional<Machine> saved = saved_this_machine();
  if (!saved || saved->isa != kernels.name || saved->cpu != machine_info().cpu) return {};
  return saved->curves;
}

// Adds to a row of a part what follows from the GPU's rates, and --activations and
// --simulate-routing unless they are the default.
void add_gpu_fields(const BenchInput& bench, nlohmann::ordered_json& row) {
  const bool fp8 = bench.options.fp8_activations;
  if (row.contains("gpu_seconds")) {
    std::optional<double> ratio;
    if (bench.gpu && row["gpu_seconds"].is_number()) {
      const PeakRates& peak = bench.gpu->peak;
      const Bounds bounds = {bench.gpu->read_bytes_per_second, fp8 ? peak.fp8 : peak.bf16};
      ratio = bounds.seconds({row["bytes"], row["ops"]}) / row["gpu_seconds"].get<double>();
    }
    row["gpu_roofline_ratio"] = or_null(ratio);
    if (bench.gpu && bench.gpu->datasheet_bf16_ops_per_second > 0 && !fp8) {
      std::optional<double> share;
      if (row["gpu_seconds"].is_number())
        share = row["ops"].get<double>() / row["gpu_seconds"].get<double>() /
                bench.gpu->datasheet_bf16_ops_per_second;
      row["gpu_datasheet_ratio"] = or_null(share);
    }
  }
  if (fp8) row["gpu_activations"] = "fp8";
  if (const SimulatedRouting& routing = bench.options.simulated_routing;
      routing.kind != SimulatedRouting::Kind::kModel)
    row["simulated_routing"] = name_of(routing);
}

}  // namespace

ModelConfig with_simulated_routing(const BenchInput& bench, ModelConfig cut) {
  if (cut.router.n_experts > 0)
    cut.router.simulated = simulated_choices(bench.options.simulated_routing, cut, bench.config);
  return cut;
}

BenchInput checked_input(const Benchmark& benchmark, BenchOptions options) {
  check(benchmark.on_cpu || benchmark.alone || benchmark.on_ranks, "a function measures");
  check_options(options);
  if (benchmark.check) benchmark.check(options);
  if (!takes(benchmark, BenchFlag::kConfig)) return {.options = std::move(options)};
  BenchInput input = input_for(benchmark, std::move(options));
  if (benchmark.check_input) benchmark.check_input(input);
  return input;
}

void run_benchmark(const Benchmark& benchmark, BenchInput bench, const OnRow& on_row) {
  const BenchOptions& o = bench.options;
  if (benchmark.on_ranks) return benchmark.on_ranks(bench, on_row);
  if (bench.gpus)
    bench.gpu = benchmark.all_gpu_rates ? measured_gpu(kGpuSeconds)
                                        : measured_gpu_bounds(kGpuSeconds, o.fp8_activations);
  if (benchmark.alone && (bench.gpus || !benchmark.on_cpu)) return benchmark.alone(bench, on_row);
  const cpu::KernelTable kernels = cpu::kernels_for(*o.isa);
  bench.curves = saved_curves(kernels);
  // Created after the driver's threads, which would otherwise inherit the team's pinned core.
  Team team(o.n_threads);
  const int64_t enough = MachineSpeed::enough_bytes(team);
  MachineSpeed speed(
      team, o.memory_gb > 0 ? std::min(enough, static_cast<int64_t>(o.memory_gb * 1e9)) : enough);
  benchmark.on_cpu(bench, kernels, speed, [&](nlohmann::ordered_json row) {
    add_gpu_fields(bench, row);
    on_row(row);
  });
}

nlohmann::ordered_json new_row(const char* name, const BenchInput& bench, std::string_view format,
                               const cpu::KernelTable& kernels, MachineSpeed& speed) {
  return {{"bench", name},
          {"config", bench.options.config},
          {"format", format},
          {"isa", kernels.name},
          {"threads", speed.team().size()}};
}

}  // namespace tandem
