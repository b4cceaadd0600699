// The results of a serving benchmark: metrics, the text block of sglang.bench_serving 0.4.9, byte
// for byte, its JSON line, and a table of several runs.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bench/serving/answer_reader.h"
#include "text/tokenizer.h"

namespace tandem {

// Computed like numpy; zeros for an empty list. Seconds in, milliseconds out.
struct LatencySummary {
  double mean = 0, median = 0, deviation = 0, p95 = 0, p99 = 0, most = 0;
};
LatencySummary summary_of(std::vector<double> seconds);

struct ServingMetrics {
  double seconds = 0;  // of the run
  int completed = 0, failed = 0, interrupted = 0;
  int64_t input_tokens = 0, output_tokens = 0, retokenized = 0;
  LatencySummary e2e, ttft, tpot, itl;  // end to end, to first text, per later token, between texts
  double concurrency = 0;               // mean number of requests in flight
  std::optional<double> accept_length;  // of speculative decoding, if the server reports it

  double requests_per_second() const { return completed / seconds; }
  double input_per_second() const { return static_cast<double>(input_tokens) / seconds; }
  double output_per_second() const { return static_cast<double>(output_tokens) / seconds; }
  // Tokens per second of the mean user, and of one in the slowest percent.
  double user_speed() const { return tpot.mean > 0 ? 1e3 / tpot.mean : 0; }
  double slow_user_speed() const { return tpot.p99 > 0 ? 1e3 / tpot.p99 : 0; }
};

// Metrics of the requests that succeeded, and of those interrupted after their first text, up to
// the interruption; tokens of the latter are counted by tokenizing their text.
ServingMetrics metrics_of(std::span<const ServingOutput> outputs, double seconds,
                          const Tokenizer& tokenizer);

// The options that the report repeats.
struct ServingSetup {
  std::string backend, dataset;
  double request_rate;             // may be infinite
  std::optional<int> concurrency;  // maximum
  std::optional<int> sharegpt_output_tokens;
  int input_tokens, output_tokens;  // for random data
  double range_ratio;
  std::string simulated_routing = {};  // of the server; empty: none, and not in the report
};

std::string report_text(const ServingSetup& setup, const ServingMetrics& metrics);

// One line: the original's fields in its order, then p95 and max where the original lacks them.
std::string report_json(const ServingSetup& setup, const ServingMetrics& metrics);
// Likewise, with a list per request (--output-details).
std::string report_json(const ServingSetup& setup, const ServingMetrics& metrics,
                        std::span<const ServingOutput> outputs);

// Latencies by mean, median, P95, P99 and maximum.
std::string latency_table(const ServingMetrics& metrics);

struct ServingPoint {
  int concurrency;
  ServingMetrics metrics;
};
// True if no other point has both higher total tokens per second and more per user.
bool on_pareto_front(std::span<const ServingPoint> points, size_t i);
// `n_gpus` of the server; 0: unknown, and there is no column of tokens per second and GPU.
std::string sweep_table(std::span<const ServingPoint> points, int n_gpus);
// SVG chart of total tokens per second by tokens per second and user.
std::string sweep_chart(const std::string& title, std::span<const ServingPoint> points);

}  // namespace tandem
