#include "bench/serving/length_sweep.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <charconv>
#include <ctime>
#include <filesystem>

#include "core/check.h"
#include "io/atomic_file.h"

namespace tandem {
namespace {

std::string per_gpu(const SweepRun& run, int n_gpus) {
  return n_gpus > 0 ? fmt::format("{:.2f}", run.metrics.output_per_second() / n_gpus) : "";
}

}  // namespace

SweepLength parse_sweep_length(const std::string& text) {
  SweepLength length{};
  const char *begin = text.data(), *end = begin + text.size();
  const auto input = std::from_chars(begin, end, length.input_tokens);
  const bool colon = input.ec == std::errc() && input.ptr != end && *input.ptr == ':';
  const auto output = colon ? std::from_chars(input.ptr + 1, end, length.output_tokens) : input;
  const auto sane = [](int n) { return n >= 1 && n <= kMaxServingCount; };
  require(colon && output.ec == std::errc() && output.ptr == end && sane(length.input_tokens) &&
              sane(length.output_tokens),
          "--sweep-lengths {}: give tokens of prompt and answer, such as 1024:2048", text);
  return length;
}

std::string dated_folder() { return fmt::format("{:%Y%m%d}", fmt::localtime(std::time(nullptr))); }

std::vector<SweepRun> sweep_lengths(const ServingBenchOptions& options,
                                    const std::string& directory,
                                    const std::function<void(const std::string&)>& say) {
  std::vector<SweepLength> lengths;
  for (const std::string& text : options.sweep_lengths) lengths.push_back(parse_sweep_length(text));
  std::vector<int> numbers = options.sweep_n_prompts;
  if (numbers.empty()) numbers = {options.dataset.n_prompts};
  for (const int n : numbers)
    require(n >= 1 && n <= kMaxServingCount, "--sweep-num-prompts {}: must be between 1 and {}", n,
            kMaxServingCount);
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  require(std::filesystem::is_directory(directory, error),
          "--sweep-dir {}: cannot be made: name a folder that can be", directory);
  std::vector<SweepRun> runs;
  for (const SweepLength& length : lengths)
    for (const int n : numbers) {
      ServingBenchOptions one = options;
      one.dataset.input_tokens = length.input_tokens;
      one.dataset.output_tokens = length.output_tokens;
      one.dataset.n_prompts = n;
      const std::string name = fmt::format("{}/speed_in{}_out{}_n{}", directory,
                                           length.input_tokens, length.output_tokens, n);
      one.output_file = name + ".jsonl";
      say(fmt::format("prompts of {} tokens, answers of {}, {} requests", length.input_tokens,
                      length.output_tokens, n));
      ServingBench bench(one, say);
      const ServingBench::Run run = bench.run(one.max_concurrency, bench.n_requests());
      write_new_file(name + ".log", run.report + latency_table(run.metrics));
      runs.push_back({length, n, run.metrics});
      write_new_file(directory + "/summary.csv", sweep_csv(runs, options.n_gpus));
      if (!run.first_error.empty()) say("a request failed: " + run.first_error);
      if (run.interrupted) return runs;
    }
  return runs;
}

std::string sweep_csv(const std::vector<SweepRun>& runs, int n_gpus) {
  std::string text =
      "input_tokens,output_tokens,num_prompts,completed,failed,interrupted,duration_s,"
      "output_tokens_per_s,total_tokens_per_s,output_tokens_per_s_per_gpu,tokens_per_s_user,"
      "mean_ttft_ms,p99_ttft_ms,mean_tpot_ms,p99_tpot_ms\n";
  for (const SweepRun& run : runs) {
    const ServingMetrics& m = run.metrics;
    text += fmt::format(
        "{},{},{},{},{},{},{:.2f},{:.2f},{:.2f},{},{:.2f},{:.2f},{:.2f},{:.2f},{:.2f}\n",
        run.length.input_tokens, run.length.output_tokens, run.n_prompts, m.completed, m.failed,
        m.interrupted, m.seconds, m.output_per_second(),
        m.output_per_second() + m.input_per_second(), per_gpu(run, n_gpus), m.user_speed(),
        m.ttft.mean, m.ttft.p99, m.tpot.mean, m.tpot.p99);
  }
  return text;
}

std::string sweep_summary(const std::vector<SweepRun>& runs, int n_gpus) {
  std::string text =
      fmt::format("\n{:>8}{:>8}{:>10}{:>14}{:>12}{:>12}{:>14}{:>12}{:>8}\n", "in", "out",
                  "requests", "output tok/s", "a GPU", "a user", "TTFT ms mean", "P99", "failed");
  for (const SweepRun& run : runs) {
    const ServingMetrics& m = run.metrics;
    text += fmt::format("{:>8}{:>8}{:>10}{:>14.2f}{:>12}{:>12.2f}{:>14.1f}{:>12.1f}{:>8}\n",
                        run.length.input_tokens, run.length.output_tokens, run.n_prompts,
                        m.output_per_second(), per_gpu(run, n_gpus), m.user_speed(), m.ttft.mean,
                        m.ttft.p99, m.failed);
  }
  return text;
}

}  // namespace tandem
