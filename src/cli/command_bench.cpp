// tandem bench: measures this machine and the engine's kernels on it. Options and output of every
// benchmark follow from its description (bench/benchmark.h).
#include <cstdio>
#include <fstream>

#include "cli/command_options.h"
#include "cli/console.h"
#include "cli/typed_options.h"

namespace tandem {
namespace {

int bench_command(const Options& options) {
  const Benchmark& benchmark = *options.benchmark;
  const BenchOptions& o = options.bench;
  BenchInput input = checked_input(benchmark, o);
  if (!o.plot.empty()) require_writable_plot(o.plot);
  std::vector<nlohmann::ordered_json> rows;
  run_benchmark(benchmark, std::move(input), [&](const nlohmann::ordered_json& row) {
    std::string text;
    if (o.json)
      text = row.dump() + "\n";
    else if (o.csv)
      text = (rows.empty() ? csv_header(row) : "") + csv_text(row);
    else
      text = (rows.empty() && benchmark.header ? benchmark.header(row) : "") + benchmark.text(row);
    std::fputs(text.c_str(), stdout);
    std::fflush(stdout);
    rows.push_back(row);
  });
  require(!rows.empty(), "there is nothing to measure: every --tokens is longer than every --ctx");
  if (!o.plot.empty()) write_plot(o.plot, rows_chart(rows));
  return 0;
}

void add_flag(CLI::App& sub, BenchOptions& o, const Benchmark& benchmark, BenchFlag flag) {
  const auto list = [&](const char* name, std::vector<int>& values, const char* help) {
    sub.add_option(name, values, help)->delimiter(',');
  };
  switch (flag) {
    case BenchFlag::kConfig:
      add_value(sub, "--config", o.config,
                "model whose shapes are measured: r1, v3, v2, v2-lite, k2, moonlight, .., or a "
                "config.json or model directory");
      return;
    case BenchFlag::kDevice:
      return add_device(sub, o.device,
                        benchmark.on_ranks
                            ? "what of the ranks is measured: cpu, or cuda: their GPUs; auto: cpu"
                            : "device: auto (a GPU if there is one), cpu or cuda");
    case BenchFlag::kIsa:
      return add_isa(sub, o.isa, "instruction set: auto, reference, avx2, avx512 or amx");
    case BenchFlag::kTokens:
      return list("--tokens", o.tokens, benchmark.tokens_help);
    case BenchFlag::kCsv:
      sub.add_flag("--csv", o.csv, "print comma-separated values");
      return;
    case BenchFlag::kPlot:
      sub.add_option("--plot", o.plot, "draw the rows into this SVG file");
      return;
    case BenchFlag::kContexts:
      return list("--ctx", o.contexts, "tokens in the KV cache, a list");
    case BenchFlag::kContextLimit:
      add_value(sub, "--context-limit", o.context_limit,
                "tokens of a sequence for which the cache is made, as a model's --ctx; 0: the "
                "longest --ctx measured");
      return;
    case BenchFlag::kBatches:
      return list("--batch", o.batches, "concurrent sequences, a list");
    case BenchFlag::kLayers:
      add_value(sub, "--layers", o.layers, benchmark.layers_help);
      return;
    case BenchFlag::kExperts:
      add_format(sub, "--experts", o.experts,
                 "format of routed experts: auto (the checkpoint's), fp8, bf16, int8, int4, "
                 "int4-32, ..");
      return;
    case BenchFlag::kFormat:
      add_format(sub, "--format", o.format,
                 "format of the matrices: auto (the checkpoint's), fp8, bf16, ..");
      return;
    case BenchFlag::kActivations:
      return add_activations(sub, o.fp8_activations,
                             "type of activations in products of many tokens on the GPU: bf16, or "
                             "fp8 with weights in FP8");
    case BenchFlag::kNewTokens:
      add_value(sub, "-n", o.new_tokens, "tokens to decode at each context");
      return;
    case BenchFlag::kDraftTokens:
      return list("--draft-tokens", o.draft_tokens,
                  "also decode with so many drafts of a sequence per step, a list");
    case BenchFlag::kDrafts:
      sub.add_option(
             "--acceptance", o.acceptances,
             "part of the drafts that are right, if all drafts before them in a step are, a "
             "list; without it, 0.85")
          ->delimiter(',');
      add_value(sub, "--decided-steps", o.decided_steps,
                "also decode so many steps with as many drafts as pay, by what is measured");
      return;
    case BenchFlag::kSkew:
      sub.add_flag("--skew", o.skew, "also measure with one expert that gets half of the tokens");
      return;
    case BenchFlag::kVariants:
      sub.add_flag("--variants", o.variants,
                   "measure five orders of computing one token's attention with its projections "
                   "instead: CD, CC, A_CC, A_CC_ME, AM_CC_ME");
      return;
    case BenchFlag::kDisk:
      sub.add_option("--disk", o.disk,
                     "file or model directory to read; without it, a temporary file in the cache "
                     "directory");
      return;
    case BenchFlag::kBaseline:
      sub.add_option("--baseline", o.baseline,
                     "torch: also measure the same shapes in PyTorch with BF16 weights, where "
                     "python3 can import it");
      return;
    case BenchFlag::kSimulateRouting:
      add_simulated_routing(sub, o.simulated_routing);
      return;
    case BenchFlag::kBytes:
      sub.add_option("--bytes", o.bytes,
                     "bytes of a collective call, a list; without it, from 1 KB to 64 MB")
          ->delimiter(',');
      return;
    case BenchFlag::kNetwork:
      sub.add_option(
          "--out", o.out,
          "machine file whose `network` is set to what was measured between hosts, and "
          "`gpu_link` to that between the GPUs of a host; where there is none, this machine's "
          "measurement with it. Without ranks `request_seconds` is set");
      sub.add_flag("--as-network", o.as_network,
                   "with --out: take the ranks of one host for hosts");
      add_simulated_network(sub, {o.simulated_hosts, o.simulated_delay, o.simulated_rate}, true);
      return;
    case BenchFlag::kOverlap:
      add_value(sub, "--model", o.model, "model directory; without it, the embedded tiny-r1");
      sub.add_option(
          "--timeline", o.timeline,
          "write a timeline of all ranks for a Chrome trace viewer: the last of --tokens as "
          "a whole prompt, and in two micro-batches");
      add_dispatch(sub, o.dispatch);
      add_expert_rows(sub, o.rows);
      add_simulated_network(sub, {o.simulated_hosts, o.simulated_delay, o.simulated_rate}, true);
      add_workers(sub, o.workers);
      return;
    case BenchFlag::kCurves:
      sub.add_option("--curves", o.curves,
                     "file of rows printed by `tandem bench experts|mlp|attention --json`, from "
                     "which `tandem plan` takes this machine's efficiencies instead of defaults");
      return;
  }
}

}  // namespace

void add_bench(CLI::App& app, Options& options, Command& command) {
  BenchOptions& o = options.bench;
  o.progress = show_measuring;
  o.warn = [](const std::string& line) { fmt::print(stderr, "warning: {}\n", line); };
  CLI::App* bench = app.add_subcommand("bench", "measure this machine and the engine on it");
  bench->require_subcommand(1);
  bench->footer(
      "Examples:\n"
      "  tandem bench machine\n"
      "  tandem bench experts --config r1 --experts fp8 --tokens 1,8,128\n"
      "  tandem bench generate --config r1 --layers 5 --json\n"
      "See `tandem bench WHAT --help` for the options of a benchmark.");
  for (const Benchmark& benchmark : all_benchmarks()) {
    CLI::App& sub = *bench->add_subcommand(benchmark.name, benchmark.help);
    sub.footer(std::string("Examples:\n") + benchmark.examples);
    sub.callback([&] {
      options.benchmark = &benchmark;
      command = bench_command;
    });
    if (benchmark.on_ranks)
      add_ranks(sub, options.n_ranks);
    else
      add_threads(sub, o.n_threads);
    add_value(sub, "--seconds", o.seconds, "time to measure each row");
    if (!benchmark.on_ranks)
      add_value(sub, "--memory", o.memory_gb,
                "GB of memory for weights and for measuring the read rate; 0: a fraction of the "
                "free memory");
    sub.add_flag("--json", o.json, "print one JSON object per row");
    for (const BenchFlag flag : benchmark.flags) add_flag(sub, o, benchmark, flag);
  }
  add_serving_bench(*bench, options, command);
}

void require_writable_plot(const std::string& file) {
  require(std::ofstream(file, std::ios::app).is_open(), "--plot {}: cannot be written", file);
}

void write_plot(const std::string& file, const std::string& svg) {
  std::ofstream plot(file);
  require(plot.is_open() && (plot << svg).flush().good(), "--plot {}: cannot be written", file);
}

}  // namespace tandem
