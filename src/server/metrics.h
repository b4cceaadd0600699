// The server's metrics in Prometheus' text format, under our names and vLLM's, so that dashboards
// made for vLLM work.
#pragma once
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "scheduling/expert_loads.h"

namespace tandem {

class Histogram {
 public:
  explicit Histogram(std::span<const double> bounds)
      : bounds_(bounds.begin(), bounds.end()), counts_(bounds.size() + 1) {}
  void add(double value);
  // The lines of the metric `name`. `labels` are without braces.
  std::string text(const std::string& name, const std::string& labels) const;

 private:
  std::vector<double> bounds_;  // inclusive upper bounds of the buckets
  std::vector<int64_t> counts_;
  int64_t n_ = 0;
  double sum_ = 0;
};

// The servers that this one asks for something.
struct OtherServers {
  std::vector<WorkerStatus> workers = {};
  std::vector<PrefixServerStatus> prefill = {};
};

// Thread-safe.
class Metrics {
 public:
  Metrics();

  struct Finished {
    FinishReason reason;
    int prompt_tokens, generated_tokens;
    double queue_seconds, prefill_seconds, decode_seconds, total_seconds;
  };
  void first_token(double seconds_since_request);
  void next_token(double seconds_since_last);
  void finished(const Finished& request);
  void http_response(int http_status);

  // What is counted of routed experts, and where they are.
  struct Experts {
    const ExpertUses& uses;
    const ExpertHomes& homes;
  };
  // `counts` is null while the model is loading, `experts` while or if they are not counted.
  std::string text(const std::string& model, const EngineCounts* counts,
                   const Experts* experts = nullptr, const OtherServers& others = {}) const;

 private:
  mutable std::mutex mutex_;
  Histogram first_token_, between_tokens_, total_, queue_, prefill_, decode_;
  Histogram prompt_tokens_, generated_tokens_;
  int64_t n_prompt_tokens_ = 0;
  std::vector<int64_t> n_finished_;                   // [FinishReason]
  std::vector<std::pair<int, int64_t>> n_responses_;  // (HTTP status, count)
};

}  // namespace tandem
