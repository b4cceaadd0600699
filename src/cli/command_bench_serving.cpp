// tandem bench serving: loads a server like sglang.benchmark.serving, with the same report.
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "bench/serving/serving_bench.h"
#include "cli/options.h"
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

  // The highest concurrency at which 99 % of users get that speed and no request fails.
  int highest_at(double tokens_per_second, int most) {
    return highest_that(most, [&](int concurrency) {
      if (interrupted_) return false;
      const ServingMetrics& m = at(concurrency);
      return m.failed == 0 && m.interrupted == 0 && m.slow_user_speed() >= tokens_per_second;
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

void write_plot(const std::string& file, const std::string& title,
                const std::vector<ServingPoint>& points) {
  std::ofstream plot(file);
  require(plot.is_open() && (plot << sweep_chart(title, points)).flush().good(),
          "--plot {}: cannot be written", file);
}

int run_several(ServingBench& bench, const ServingBenchOptions& o, bool json) {
  Runs runs(bench, json);
  for (const int concurrency : o.concurrency)
    if (!runs.interrupted()) runs.at(concurrency);
  const int most = std::min(o.max_concurrency.value_or(o.dataset.n_prompts),
                            static_cast<int>(bench.n_requests()));
  std::string found;
  for (const double speed : o.slo_tokens_a_user) {
    const int n = runs.highest_at(speed, most);
    if (runs.interrupted()) break;
    if (json)
      found += fmt::format("{{\"slo_tps_user\": {}, \"max_concurrency\": {}}}\n", speed, n);
    else if (n == 0)
      found += fmt::format("\n{} tokens/s for each user: not even for one\n", speed);
    else
      found +=
          fmt::format("\n{} tokens/s for each user: up to {} at once, {:.1f} tokens/s{}\n", speed,
                      n, runs.at(n).output_per_second(), n == most ? "; more were not tried" : "");
  }
  if (!json) std::fputs(sweep_table(runs.points()).c_str(), stdout);
  std::fputs(found.c_str(), stdout);
  if (!o.plot.empty()) write_plot(o.plot, "serving " + bench.model(), runs.points());
  return runs.status();
}

}  // namespace

int bench_serving_command(const Options& options) {
  ServingBenchOptions o = options.serving;
  o.disable_tqdm = o.disable_tqdm || options.json || isatty(STDERR_FILENO) == 0;
  const bool several = !o.concurrency.empty() || !o.slo_tokens_a_user.empty();
  require(several || o.plot.empty(), "--plot {}: needs --concurrency or --slo-tps-user", o.plot);
  if (!o.plot.empty())
    require(std::ofstream(o.plot, std::ios::app).is_open(), "--plot {}: cannot be written", o.plot);
  ServingBench bench(o, [&](const std::string& line) {
    if (!options.json) fmt::print("{}\n", line);
    std::fflush(stdout);
  });
  return several ? run_several(bench, o, options.json) : run_once(bench, o, options.json);
}

}  // namespace tandem
