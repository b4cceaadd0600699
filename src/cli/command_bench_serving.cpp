// tandem bench serving: loads a server like sglang.benchmark.serving, with the same report.
#include <unistd.h>

#include <cstdio>

#include "bench/serving/length_sweep.h"
#include "cli/command_options.h"
#include "cli/typed_options.h"
#include "core/check.h"

namespace tandem {
namespace {

// Runs against one server: at given loads, or at those that a search chooses.
class Runs {
 public:
  Runs(ServingBench& bench, bool json) : bench_(bench), json_(json) {}

  // Runs at most once per concurrency.
  const ServingMetrics& at(int concurrency) {
    const auto found = std::find_if(points_.begin(), points_.end(), [&](const ServingPoint& p) {
      return p.concurrency == concurrency;
    });
    if (found != points_.end()) return found->metrics;
    const ServingBench::Run run = bench_.run(concurrency, bench_.requests_for(concurrency));
    if (json_) std::fputs(run.json.c_str(), stdout);
    fmt::print(stderr, "concurrency {}: {:.1f} tokens/s, {:.2f} for a user\n", concurrency,
               run.metrics.output_per_second(), run.metrics.user_speed());
    if (!run.first_error.empty()) fmt::print(stderr, "a request failed: {}\n", run.first_error);
    failed_ = failed_ || run.metrics.failed > 0;
    interrupted_ = interrupted_ || run.interrupted;
    points_.push_back({concurrency, run.metrics});
    return points_.back().metrics;
  }

  // The highest concurrency at which 99 % of users get that speed, and their first token in that
  // time, and no request fails.
  int highest_at(double tokens_per_second, std::optional<double> ttft_seconds, int most) {
    return highest_that(most, [&](int concurrency) {
      if (interrupted_) return false;
      const ServingMetrics& m = at(concurrency);
      return m.failed == 0 && m.interrupted == 0 && m.slow_user_speed() >= tokens_per_second &&
             (!ttft_seconds || m.ttft.p99 <= *ttft_seconds * 1e3);
    });
  }

  std::vector<ServingPoint> points() const {
    std::vector<ServingPoint> sorted = points_;
    std::sort(sorted.begin(), sorted.end(), [](const ServingPoint& a, const ServingPoint& b) {
      return a.concurrency < b.concurrency;
    });
    return sorted;
  }
  bool interrupted() const { return interrupted_; }
  int status() const { return failed_ || interrupted_ ? 1 : 0; }

 private:
  ServingBench& bench_;
  const bool json_;
  std::vector<ServingPoint> points_;
  bool failed_ = false, interrupted_ = false;
};

int run_once(ServingBench& bench, const ServingBenchOptions& o, bool json) {
  const ServingBench::Run run = bench.run(o.max_concurrency, bench.n_requests());
  std::fputs(json ? run.json.c_str() : (run.report + latency_table(run.metrics)).c_str(), stdout);
  if (run.interrupted)
    fmt::print(stderr,
               "interrupted: {} requests had not ended; what they had counts, their number does "
               "not\n",
               run.metrics.interrupted);
  if (run.metrics.failed > 0)
    fmt::print(stderr, "error: {} of {} requests failed; the first: {}\n", run.metrics.failed,
               bench.n_requests(), run.first_error);
  return run.interrupted || run.metrics.failed > 0 ? 1 : 0;
}

// "20 tokens/s for each user and a first token within 5 s".
std::string objective_text(const ServingBenchOptions& o, double speed) {
  std::string text = "\n";
  if (speed > 0) text += fmt::format("{} tokens/s for each user", speed);
  if (speed > 0 && o.slo_ttft) text += " and ";
  if (o.slo_ttft) text += fmt::format("a first token within {} s", *o.slo_ttft);
  return text;
}

std::string objective_json(const ServingBenchOptions& o, double speed, int concurrency) {
  nlohmann::ordered_json json;
  if (speed > 0) json["slo_tps_user"] = speed;
  if (o.slo_ttft) json["slo_ttft"] = *o.slo_ttft;
  json["max_concurrency"] = concurrency;
  return json.dump() + "\n";
}

int run_several(ServingBench& bench, const ServingBenchOptions& o, bool json) {
  Runs runs(bench, json);
  for (const int concurrency : o.concurrency)
    if (!runs.interrupted()) runs.at(concurrency);
  const int most = std::min(o.max_concurrency.value_or(o.dataset.n_prompts),
                            static_cast<int>(bench.n_requests()));
  std::string found;
  std::vector<double> speeds = o.slo_tokens_a_user;
  if (speeds.empty() && o.slo_ttft) speeds = {0};
  for (const double speed : speeds) {
    const int n = runs.highest_at(speed, o.slo_ttft, most);
    if (runs.interrupted()) break;
    found += json ? objective_json(o, speed, n) : objective_text(o, speed);
    if (!json)
      found += n == 0 ? ": not even for one\n"
                      : fmt::format(": up to {} at once, {:.1f} tokens/s{}\n", n,
                                    runs.at(n).output_per_second(),
                                    n == most ? "; more were not tried" : "");
  }
  if (!json) std::fputs(sweep_table(runs.points(), o.n_gpus).c_str(), stdout);
  std::fputs(found.c_str(), stdout);
  if (!o.plot.empty()) write_plot(o.plot, sweep_chart("serving " + bench.model(), runs.points()));
  return runs.status();
}

// One run for each length and number of prompts.
int run_sweep(const ServingBenchOptions& o, bool json) {
  const std::string directory = o.sweep_directory.empty() ? dated_folder() : o.sweep_directory;
  const std::vector<SweepRun> runs = sweep_lengths(o, directory, [&](const std::string& line) {
    if (!json) fmt::print("{}\n", line);
    std::fflush(stdout);
  });
  if (json)
    std::fputs(sweep_csv(runs, o.n_gpus).c_str(), stdout);
  else
    fmt::print("{}\nin {}: a file of each run, and summary.csv\n", sweep_summary(runs, o.n_gpus),
               directory);
  for (const SweepRun& run : runs)
    if (run.metrics.failed > 0 || run.metrics.interrupted > 0) return 1;
  return 0;
}

// What a preset sets, where the command line does not.
void apply_preset(const CLI::App& serving, const std::string& name, ServingBenchOptions& o) {
  if (name.empty()) return;
  const WorkloadPreset& preset = workload_preset(name);
  const auto given = [&](const char* option) { return serving.count(option) > 0; };
  DatasetOptions& d = o.dataset;
  if (!given("--dataset-name")) d.name = d.path.empty() ? "random-ids" : "random";
  if (!given("--random-input-len")) d.input_tokens = preset.input_tokens;
  if (!given("--random-output-len")) d.output_tokens = preset.output_tokens;
  if (!given("--random-range-ratio")) d.range_ratio = 1;
  if (!given("--concurrency") && !given("--slo-tps-user") && !given("--slo-ttft"))
    o.concurrency.assign(preset.concurrency.begin(), preset.concurrency.end());
  const int most =
      o.concurrency.empty() ? preset.concurrency.back() : *std::ranges::max_element(o.concurrency);
  if (!given("--num-prompts")) d.n_prompts = 4 * most;  // as many as requests_for() wants
}

int bench_serving_command(const Options& options) {
  ServingBenchOptions o = options.serving;
  o.disable_tqdm = o.disable_tqdm || options.json || isatty(STDERR_FILENO) == 0;
  const bool several = !o.concurrency.empty() || !o.slo_tokens_a_user.empty() || o.slo_ttft;
  require(several || o.plot.empty(), "--plot {}: needs --concurrency or --slo-tps-user", o.plot);
  require(!o.sweep_lengths.empty() || (o.sweep_n_prompts.empty() && o.sweep_directory.empty()),
          "--sweep-num-prompts and --sweep-dir need --sweep-lengths");
  require(o.sweep_lengths.empty() || (!several && o.output_file.empty()),
          "--sweep-lengths: --concurrency, --slo-tps-user, --slo-ttft and --output-file are for "
          "other runs; give --max-concurrency");
  if (!o.sweep_lengths.empty()) return run_sweep(o, options.json);
  if (!o.plot.empty()) require_writable_plot(o.plot);
  ServingBench bench(o, [&](const std::string& line) {
    if (!options.json) fmt::print("{}\n", line);
    std::fflush(stdout);
  });
  return several ? run_several(bench, o, options.json) : run_once(bench, o, options.json);
}

void add_serving_options(CLI::App& serving, Options& options) {
  ServingBenchOptions& o = options.serving;
  DatasetOptions& d = o.dataset;
  // Like the original's parser, the last of repeated options wins: scripts append overrides.
  serving.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  add_value(serving, "--backend", o.backend,
            "kind of server: sglang or sglang-native (/generate); sglang-oai, vllm or lmdeploy "
            "(/v1/completions); or one of the last three with -chat");
  serving.add_option("--base-url", o.base_url, "http://HOST:PORT, instead of --host and --port");
  add_value(serving, "--host", o.host, "host of the server");
  serving.add_option("--port", o.port,
                     "port of the server; default: 8000 for vllm, 23333 for lmdeploy, else 30000");
  serving.add_option("--model", o.model,
                     "name of the model; without it, the first of the server's /v1/models");
  serving.add_option("--tokenizer", o.tokenizer,
                     "model directory with the tokenizer; without it, --model is used");
  add_value(serving, "--dataset-name", d.name,
            "where prompts come from: sharegpt, random or random-ids");
  serving.add_option("--dataset-path", d.path, "a ShareGPT file, for sharegpt and random");
  add_value(serving, "--num-prompts,--num-prompt", d.n_prompts, "number of requests");
  add_value(serving, "--random-input-len,--random-input", d.input_tokens,
            "maximum tokens of a prompt");
  add_value(serving, "--random-output-len,--random-output", d.output_tokens,
            "maximum tokens of an answer");
  add_value(serving, "--random-range-ratio", d.range_ratio,
            "minimum as a fraction of the maximum; 1: all of equal length");
  serving.add_option("--sharegpt-output-len", d.sharegpt_output_tokens,
                     "tokens of every answer, instead of those in the file");
  serving.add_option("--sharegpt-context-len", d.sharegpt_context,
                     "skip conversations with more tokens than this");
  serving.add_option("--prompt-suffix", d.prompt_suffix,
                     "text appended to each prompt of sharegpt");
  serving.add_flag("--tokenize-prompt", d.sends_ids, "send token ids instead of text (sglang)");
  serving
      .add_option("--request-rate", o.request_rate,
                  "requests per second, at random times (Poisson process); inf: all at once")
      ->default_str("inf");
  serving.add_option("--max-concurrency", o.max_concurrency,
                     "maximum number of concurrent requests; others wait in the client");
  add_value(serving, "--warmup-requests", o.warmup_requests,
            "number of requests sent before measuring");
  add_value(serving, "--seed", o.seed, "the same seed gives the same requests");
  serving.add_flag("--disable-stream", o.disable_stream, "request answers without streaming");
  serving.add_flag("--return-logprob", o.return_logprob, "request log-probabilities (sglang)");
  serving.add_flag("--disable-ignore-eos", o.disable_ignore_eos, "let the model end answers");
  serving.add_option("--extra-request-body", o.extra_request_body,
                     "JSON object whose fields are added to each request");
  serving.add_flag("--flush-cache", o.flush_cache,
                   "empty the server's prefix cache before measuring");
  serving.add_option(
      "--output-file", o.output_file,
      "file to which a line of JSON is appended; default: BACKEND_MMDD_N_IN_OUT.jsonl");
  serving.add_flag("--output-details", o.output_details,
                   "include lists with a value per request in that line");
  serving.add_flag("--disable-tqdm", o.disable_tqdm, "print no progress");
  serving.add_option("--plot", o.plot,
                     "draw the runs of --concurrency or --slo-tps-user into this SVG file");
  serving.add_flag("--json", options.json, "print reports as lines of JSON");
  serving.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::Throw);
  serving
      .add_option("--concurrency", o.concurrency,
                  "a list: a run at each, with four requests per user, and a table")
      ->delimiter(',');
  serving
      .add_option("--slo-tps-user", o.slo_tokens_a_user,
                  "a list: search the highest concurrency at which 99 % of users get this many "
                  "tokens per second")
      ->delimiter(',');
  serving.add_option("--slo-ttft", o.slo_ttft,
                     "with --slo-tps-user or alone: 99 % of first tokens come within so many "
                     "seconds");
  serving.add_option("--gpus", o.n_gpus, "GPUs of the server, for tokens per second and GPU");
  serving
      .add_option("--sweep-lengths", o.sweep_lengths,
                  "a list such as 1024:1024,2048:512: a run for each length of prompts and answers "
                  "and each of --sweep-num-prompts, with a file each and a summary")
      ->delimiter(',');
  serving
      .add_option("--sweep-num-prompts", o.sweep_n_prompts,
                  "a list; without it, --num-prompts alone")
      ->delimiter(',');
  serving.add_option("--sweep-dir", o.sweep_directory,
                     "folder of the sweep's files; default: the date as YYYYMMDD");
}

}  // namespace

void add_serving_bench(CLI::App& bench, Options& options, Command& command) {
  CLI::App* serving = bench.add_subcommand(
      "serving", "load a server, with the command line and report of sglang.bench_serving");
  serving->footer(
      "Examples:\n"
      "  tandem bench serving --backend lmdeploy --port 8000 --dataset-name random --dataset-path "
      "ShareGPT.json\n"
      "      --random-range-ratio 1 --random-input-len 1024 --random-output-len 1024 "
      "--num-prompts 200\n"
      "  tandem bench serving --backend vllm --dataset-name random-ids --concurrency 1,4,16 --plot "
      "sweep.svg\n"
      "  tandem bench serving --backend vllm --dataset-name random-ids --slo-tps-user 20,10 "
      "--slo-ttft 5\n"
      "  tandem bench serving --backend vllm --preset isl1k-osl1k --gpus 8\n"
      "  tandem bench serving --backend vllm --dataset-name random-ids --random-range-ratio 1\n"
      "      --sweep-lengths 1024:1024,2048:2048 --sweep-num-prompts 200,2000\n");
  ServingBenchOptions& o = options.serving;
  add_serving_options(*serving, options);
  serving->add_option("--preset", options.serving_preset,
                      "isl1k-osl1k: prompts and answers of 1,000 tokens, at 8, 64 and 2,048 users "
                      "unless other options say otherwise");
  serving->callback([&, serving] {
    apply_preset(*serving, options.serving_preset, o);
    command = bench_serving_command;
  });
}

}  // namespace tandem
