#include "bench/serving/serving_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "bench/line_chart.h"
#include "io/json.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

// Linear interpolation in a sorted list, like numpy.percentile.
double percentile(const std::vector<double>& sorted, double percent) {
  const double at = percent / 100 * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<size_t>(at);
  const size_t high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + (sorted[high] - sorted[low]) * (at - static_cast<double>(low));
}

std::string line(const char* label, const std::string& value) {
  return fmt::format("{:<40} {:<10}\n", label, value);
}
std::string line(const char* label, int64_t value) { return line(label, fmt::format("{}", value)); }
std::string line(const char* label, double value) {
  return line(label, fmt::format("{:.2f}", value));
}
std::string rule(const char* title, char fill) {
  const std::string text(title);
  const size_t n_fill = 50 - text.size(), left = n_fill / 2;
  return std::string(left, fill) + text + std::string(n_fill - left, fill) + "\n";
}

// A float as Python prints it.
std::string python_number(double value) {
  return std::isinf(value) ? "inf" : nlohmann::json(value).dump();
}

// JSON as json.dumps writes it: spaces after separators, ASCII text, infinity by name.
std::string python_json(const Json& value) {
  if (value.is_number_float() && std::isinf(value.get<double>())) return "Infinity";
  if (!value.is_structured()) return value.dump(-1, ' ', true);
  std::string text;
  for (const auto& [key, item] : value.items()) {
    if (!text.empty()) text += ", ";
    if (value.is_object()) text += Json(key).dump() + ": ";
    text += python_json(item);
  }
  return value.is_object() ? "{" + text + "}" : "[" + text + "]";
}

Json fields_of(const ServingSetup& s, const ServingMetrics& m) {
  Json json = {{"backend", s.backend},
               {"dataset_name", s.dataset},
               {"request_rate", s.request_rate},
               {"max_concurrency", or_null(s.concurrency)},
               {"sharegpt_output_len", or_null(s.sharegpt_output_tokens)},
               {"random_input_len", s.input_tokens},
               {"random_output_len", s.output_tokens},
               {"random_range_ratio", s.range_ratio},
               {"duration", m.seconds},
               {"completed", m.completed},
               {"total_input_tokens", m.input_tokens},
               {"total_output_tokens", m.output_tokens},
               {"total_output_tokens_retokenized", m.retokenized},
               {"request_throughput", m.requests_per_second()},
               {"input_throughput", m.input_per_second()},
               {"output_throughput", m.output_per_second()}};
  const auto add = [&](const std::string& name, const LatencySummary& l, bool with_p95) {
    json["mean_" + name] = l.mean;
    json["median_" + name] = l.median;
    json["std_" + name] = l.deviation;
    if (with_p95) json["p95_" + name] = l.p95;
    json["p99_" + name] = l.p99;
  };
  add("e2e_latency_ms", m.e2e, false);
  add("ttft_ms", m.ttft, false);
  add("tpot_ms", m.tpot, false);
  add("itl_ms", m.itl, true);
  json["concurrency"] = m.concurrency;
  json["accept_length"] = or_null(m.accept_length);
  return json;
}

void add_what_the_original_lacks(const ServingSetup& setup, const ServingMetrics& m, Json& json) {
  json["p95_e2e_latency_ms"] = m.e2e.p95;
  json["p95_ttft_ms"] = m.ttft.p95;
  json["p95_tpot_ms"] = m.tpot.p95;
  json["max_itl_ms"] = m.itl.most;
  json["failed"] = m.failed;
  json["interrupted"] = m.interrupted;
  if (!setup.simulated_routing.empty()) json["simulated_routing"] = setup.simulated_routing;
}

}  // namespace

LatencySummary summary_of(std::vector<double> seconds) {
  if (seconds.empty()) return {};
  std::sort(seconds.begin(), seconds.end());
  const auto n = static_cast<double>(seconds.size());
  const double mean = std::accumulate(seconds.begin(), seconds.end(), 0.0) / n;
  double squares = 0;
  for (const double s : seconds) squares += (s - mean) * (s - mean);
  return {.mean = mean * 1e3,
          .median = percentile(seconds, 50) * 1e3,
          .deviation = std::sqrt(squares / n) * 1e3,
          .p95 = percentile(seconds, 95) * 1e3,
          .p99 = percentile(seconds, 99) * 1e3,
          .most = seconds.back() * 1e3};
}

ServingMetrics metrics_of(std::span<const ServingOutput> outputs, double seconds,
                          const Tokenizer& tokenizer) {
  ServingMetrics m;
  m.seconds = seconds;
  std::vector<double> e2es, ttfts, tpots, itls;
  for (const ServingOutput& o : outputs) {
    m.completed += o.success;
    m.interrupted += o.interrupted;
    m.failed += !o.success && !o.interrupted;
    if (!o.success && (!o.interrupted || o.ttft == 0)) continue;
    const auto n_text = static_cast<int64_t>(tokenizer.encode(o.text).size());
    const int64_t n_output = o.success ? o.output_tokens : n_text;
    m.input_tokens += o.prompt_tokens;
    m.output_tokens += n_output;
    m.retokenized += n_text;
    if (n_output > 1) tpots.push_back((o.latency - o.ttft) / static_cast<double>(n_output - 1));
    itls.insert(itls.end(), o.itls.begin(), o.itls.end());
    ttfts.push_back(o.ttft);
    e2es.push_back(o.latency);
  }
  m.concurrency = std::accumulate(e2es.begin(), e2es.end(), 0.0) / seconds;
  m.e2e = summary_of(std::move(e2es));
  m.ttft = summary_of(std::move(ttfts));
  m.tpot = summary_of(std::move(tpots));
  m.itl = summary_of(std::move(itls));
  return m;
}

std::string report_text(const ServingSetup& s, const ServingMetrics& m) {
  std::string text = "\n" + rule(" Serving Benchmark Result ", '=');
  text += line("Backend:", s.backend);
  text += line("Traffic request rate:", python_number(s.request_rate));
  text += line("Max request concurrency:",
               s.concurrency ? fmt::format("{}", *s.concurrency) : "not set");
  text += line("Successful requests:", int64_t{m.completed});
  text += line("Benchmark duration (s):", m.seconds);
  text += line("Total input tokens:", m.input_tokens);
  text += line("Total generated tokens:", m.output_tokens);
  text += line("Total generated tokens (retokenized):", m.retokenized);
  text += line("Request throughput (req/s):", m.requests_per_second());
  text += line("Input token throughput (tok/s):", m.input_per_second());
  text += line("Output token throughput (tok/s):", m.output_per_second());
  text += line("Total token throughput (tok/s):", m.input_per_second() + m.output_per_second());
  text += line("Concurrency:", m.concurrency);
  if (m.accept_length) text += line("Accept length:", *m.accept_length);
  text += rule("End-to-End Latency", '-');
  text += line("Mean E2E Latency (ms):", m.e2e.mean);
  text += line("Median E2E Latency (ms):", m.e2e.median);
  text += rule("Time to First Token", '-');
  text += line("Mean TTFT (ms):", m.ttft.mean);
  text += line("Median TTFT (ms):", m.ttft.median);
  text += line("P99 TTFT (ms):", m.ttft.p99);
  text += rule("Inter-Token Latency", '-');
  text += line("Mean ITL (ms):", m.itl.mean);
  text += line("Median ITL (ms):", m.itl.median);
  text += line("P95 ITL (ms):", m.itl.p95);
  text += line("P99 ITL (ms):", m.itl.p99);
  text += line("Max ITL (ms):", m.itl.most);
  text += std::string(50, '=') + "\n";
  if (!s.simulated_routing.empty())
    text += fmt::format("The server simulates routing: {}.\n", s.simulated_routing);
  return text;
}

std::string report_json(const ServingSetup& setup, const ServingMetrics& metrics) {
  Json json = fields_of(setup, metrics);
  add_what_the_original_lacks(setup, metrics, json);
  return python_json(json) + "\n";
}

std::string report_json(const ServingSetup& setup, const ServingMetrics& metrics,
                        std::span<const ServingOutput> outputs) {
  Json json = fields_of(setup, metrics);
  for (const char* list :
       {"input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors"})
    json[list] = Json::array();
  for (const ServingOutput& o : outputs) {
    json["input_lens"].push_back(o.server_prompt_tokens > 0 ? o.server_prompt_tokens
                                                            : o.prompt_tokens);
    json["output_lens"].push_back(o.success ? o.output_tokens : 0);
    json["ttfts"].push_back(o.ttft);
    json["itls"].push_back(o.itls);
    json["generated_texts"].push_back(o.text);
    json["errors"].push_back(o.error);
  }
  add_what_the_original_lacks(setup, metrics, json);
  return python_json(json) + "\n";
}

std::string latency_table(const ServingMetrics& m) {
  std::string text = fmt::format("\n| {:<4} | {:>10} | {:>10} | {:>10} | {:>10} | {:>10} |\n", "ms",
                                 "mean", "median", "P95", "P99", "most");
  text += "|:-----|-----------:|-----------:|-----------:|-----------:|-----------:|\n";
  const auto row = [&](const char* name, const LatencySummary& l) {
    text += fmt::format("| {:<4} | {:>10.2f} | {:>10.2f} | {:>10.2f} | {:>10.2f} | {:>10.2f} |\n",
                        name, l.mean, l.median, l.p95, l.p99, l.most);
  };
  row("TTFT", m.ttft);
  row("TPOT", m.tpot);
  row("ITL", m.itl);
  row("E2E", m.e2e);
  return text;
}

bool on_pareto_front(std::span<const ServingPoint> points, size_t i) {
  const ServingMetrics& it = points[i].metrics;
  return std::none_of(points.begin(), points.end(), [&](const ServingPoint& other) {
    return other.metrics.output_per_second() > it.output_per_second() &&
           other.metrics.user_speed() > it.user_speed();
  });
}

std::string sweep_table(std::span<const ServingPoint> points, int n_gpus) {
  // A cell per GPU where their number is known.
  const auto per_gpu = [&](const std::string& cell) {
    return n_gpus > 0 ? fmt::format(" {:>11} |", cell) : "";
  };
  std::string text = fmt::format(
      "\n| concurrency | output tok/s |{} tok/s a user | slowest 1 % | TTFT ms mean |     P99 | "
      "ITL "
      "ms mean |     P99 | failed | Pareto |\n"
      "|------------:|-------------:|{}-------------:|------------:|-------------:|--------:|------"
      "------:|--------:|-------:|:-------|\n",
      per_gpu("tok/s a GPU"), n_gpus > 0 ? "------------:|" : "");
  for (size_t i = 0; i < points.size(); ++i) {
    const ServingMetrics& m = points[i].metrics;
    text += fmt::format(
        "| {:>11} | {:>12.1f} |{} {:>12.2f} | {:>11.2f} | {:>12.1f} | {:>7.1f} | {:>11.2f} | "
        "{:>7.1f} "
        "| {:>6} | {:<6} |\n",
        points[i].concurrency, m.output_per_second(),
        per_gpu(fmt::format("{:.2f}", m.output_per_second() / std::max(1, n_gpus))), m.user_speed(),
        m.slow_user_speed(), m.ttft.mean, m.ttft.p99, m.itl.mean, m.itl.p99, m.failed,
        on_pareto_front(points, i) ? "yes" : "");
  }
  return text;
}

std::string sweep_chart(const std::string& title, std::span<const ServingPoint> points) {
  LineChart chart = {.title = title,
                     .x_label = "tokens a second for a user",
                     .y_label = "tokens a second altogether",
                     .lines = {{"by concurrency", {}, {}}}};
  auto& line = chart.lines[0].points;
  for (const ServingPoint& point : points)
    if (point.metrics.user_speed() > 0)
      line.emplace_back(point.metrics.user_speed(), point.metrics.output_per_second());
  std::sort(line.begin(), line.end());
  return line.empty() ? "" : svg_of(chart);
}

}  // namespace tandem
