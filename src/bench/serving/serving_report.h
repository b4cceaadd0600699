// What a serving benchmark says at its end: figures, the text block that sglang.bench_serving 0.4.9
// prints, byte for byte, its line of JSON, and a table of several runs.
#pragma once
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bench/serving/answer_reader.h"
#include "io/tokenizer.h"

namespace tandem {

// As numpy computes them; zeros of an empty list. Seconds in, milliseconds out.
struct LatencySummary {
  double mean = 0, median = 0, deviation = 0, p95 = 0, p99 = 0, most = 0;
};
LatencySummary summary_of(std::vector<double> seconds);

struct ServingMetrics {
  double seconds = 0;  // of the run
  int completed = 0, failed = 0, interrupted = 0;
  int64_t input_tokens = 0, output_tokens = 0, retokenized = 0;
  LatencySummary e2e, ttft, tpot, itl;  // a request's, first text, a token after it, between texts
  double concurrency = 0;               // mean number of requests under way
  std::optional<double> accept_length;  // of speculative decoding, where the server says it

  double requests_per_second() const { return completed / seconds; }
  double input_per_second() const { return static_cast<double>(input_tokens) / seconds; }
  double output_per_second() const { return static_cast<double>(output_tokens) / seconds; }
  // Tokens a second of a user in the middle, and of one among the slowest in a hundred.
  double user_speed() const { return tpot.mean > 0 ? 1e3 / tpot.mean : 0; }
  double slow_user_speed() const { return tpot.p99 > 0 ? 1e3 / tpot.p99 : 0; }
};

// Of the requests that succeeded, and of those that were interrupted after their first text what
// they had until then: their tokens count as retokenized.
ServingMetrics metrics_of(std::span<const ServingOutput> outputs, double seconds,
                          const Tokenizer& tokenizer);

// What was asked for, as the report repeats it.
struct ServingSetup {
  std::string backend, dataset;
  double request_rate;             // may be infinite
  std::optional<int> concurrency;  // at most
  std::optional<int> sharegpt_output_tokens;
  int input_tokens, output_tokens;  // of random data
  double range_ratio;
};

std::string report_text(const ServingSetup& setup, const ServingMetrics& metrics);

// One line: the original's fields in its order, then p95 and max of what it leaves out.
std::string report_json(const ServingSetup& setup, const ServingMetrics& metrics);
// The same with a list for each request: --output-details.
std::string report_json(const ServingSetup& setup, const ServingMetrics& metrics,
                        std::span<const ServingOutput> outputs);

// Latencies by mean, median, P95, P99 and most.
std::string latency_table(const ServingMetrics& metrics);

struct ServingPoint {
  int concurrency;
  ServingMetrics metrics;
};
// No other point has both more tokens a second altogether and more for a user.
bool on_pareto_front(std::span<const ServingPoint> points, size_t i);
std::string sweep_table(std::span<const ServingPoint> points);
// Tokens a second by tokens a second of a user, as an SVG file's text.
std::string sweep_chart(const std::string& title, std::span<const ServingPoint> points);

}  // namespace tandem
