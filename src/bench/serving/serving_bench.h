// `tandem bench serving`: the command line of sglang.benchmark.serving and a report against any
// OpenAI-compatible server, at one load, at several, or at the highest that keeps users fast.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bench/serving/dataset.h"
#include "bench/serving/serving_load.h"
#include "bench/serving/serving_report.h"

namespace tandem {

struct ServingBenchOptions {
  std::string backend = "sglang";
  std::string base_url;  // instead of host and port
  std::string host = "0.0.0.0";
  std::optional<int> port;       // missing: the backend's usual one
  std::string model, tokenizer;  // empty: as the server says; as the model
  DatasetOptions dataset;
  double request_rate = std::numeric_limits<double>::infinity();
  std::optional<int> max_concurrency;
  int warmup_requests = 1;
  uint32_t seed = 42;
  bool disable_stream = false, return_logprob = false, disable_ignore_eos = false;
  bool flush_cache = false, output_details = false, disable_tqdm = false;
  std::string extra_request_body;  // a JSON object
  std::string output_file;         // empty: named as the original names it

  std::vector<int> concurrency;           // a run at each
  std::vector<double> slo_tokens_a_user;  // tokens a second; a search for each
  std::string plot;                       // SVG file of the runs
};

// Knows the server and what to ask it.
class ServingBench {
 public:
  // Asks the server for its model, loads the tokenizer and makes the requests. Throws Error for
  // options that cannot be, std::runtime_error when the server does not answer. `say` is given
  // lines on what is going on.
  ServingBench(const ServingBenchOptions& options, std::function<void(const std::string&)> say);

  struct Run {
    ServingMetrics metrics;
    std::string report, json;  // json: a line
    bool interrupted;
    std::string first_error;
  };
  // Warms up, then sends requests of which at most `concurrency` are under way. The line of JSON is
  // appended to the output file. Throws std::runtime_error when the warm-up fails.
  Run run(std::optional<int> concurrency, size_t n_requests);

  // Enough for a load of that many users: four rounds, at least 16, at most all.
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
  NumpyRandom numpy_;  // where making the requests left it
  std::string output_file_;
};

// The highest n of 1..most with ok(n), if it holds for all below one for which it holds; to within
// a twentieth. 0: not even ok(1).
int highest_that(int most, const std::function<bool(int)>& ok);

}  // namespace tandem
