// `tandem bench serving`: the command line of sglang.benchmark.serving and a report for any
// OpenAI-compatible server, at one load, at several, or at the highest that meets a speed per user.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bench/serving/dataset.h"
#include "bench/serving/serving_load.h"
#include "bench/serving/serving_report.h"

namespace tandem {

constexpr int kMaxServingCount = 1 << 24;  // limit of all counts

struct ServingBenchOptions {
  std::string backend = "sglang";
  std::string base_url;  // instead of host and port
  std::string host = "0.0.0.0";
  std::optional<int> port;       // empty: the backend's default
  std::string model, tokenizer;  // empty: the server's model; the model's tokenizer
  DatasetOptions dataset;
  double request_rate = std::numeric_limits<double>::infinity();
  std::optional<int> max_concurrency;
  int warmup_requests = 1;
  uint32_t seed = 42;
  bool disable_stream = false, return_logprob = false, disable_ignore_eos = false;
  bool flush_cache = false, output_details = false, disable_tqdm = false;
  std::string extra_request_body;  // a JSON object
  std::string output_file;         // empty: named as by the original

  std::vector<int> concurrency;            // one run for each
  std::vector<double> slo_tokens_a_user;   // tokens per second; one search for each
  std::optional<double> slo_ttft;          // seconds that the slowest percent may wait in them
  int n_gpus = 0;                          // of the server, for rates per GPU; 0: unknown
  std::vector<std::string> sweep_lengths;  // "IN:OUT"; one run for each and each number of prompts
  std::vector<int> sweep_n_prompts;
  std::string sweep_directory;  // empty: the date
  std::string plot;             // SVG file of the runs
};

// Holds the server's address and the requests to send.
class ServingBench {
 public:
  // Asks the server for its model, loads the tokenizer and draws the requests. Throws Error for
  // invalid options and std::runtime_error when the server does not answer. `say` receives progress
  // messages.
  ServingBench(const ServingBenchOptions& options, std::function<void(const std::string&)> say);

  struct Run {
    ServingMetrics metrics;
    std::string report, json;  // json: one line
    bool interrupted;
    std::string first_error;
  };
  // Warms up, then sends requests with at most `concurrency` in flight. Appends the JSON line to
  // the output file. Throws std::runtime_error when the warm-up fails.
  Run run(std::optional<int> concurrency, size_t n_requests);

  // Requests for a load of so many users: four rounds, at least 16, at most all.
  size_t requests_for(int concurrency) const;
  size_t n_requests() const { return requests_.size(); }
  const std::string& model() const { return load_.model; }

 private:
  void ask_for_model();
  void warm_up();
  void flush_cache() const;
  std::optional<double> accept_length() const;

  const ServingBenchOptions& options_;
  std::function<void(const std::string&)> say_;
  ServingLoadOptions load_;
  std::optional<Tokenizer> tokenizer_;
  std::vector<ServingRequest> requests_;
  NumpyRandom numpy_;  // state after drawing the requests
  std::string output_file_;
  std::string simulated_routing_;  // as the server says; reports name it
};

// The highest n of 1..most with ok(n), to within a twentieth; 0 if ok(1) is false. ok must be
// monotonic: true for all values below one for which it is true.
int highest_that(int most, const std::function<bool(int)>& ok);

}  // namespace tandem
