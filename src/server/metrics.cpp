#include "server/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace tandem {
namespace {

// vLLM's buckets (v1/metrics/loggers.py).
constexpr double kFirstToken[] = {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5,  .75,
                                  1,    2.5,  5,   7.5, 10,  20,  40,  80, 160, 640, 2560};
constexpr double kBetweenTokens[] = {.01, .025, .05, .075, .1,  .15, .2, .3, .4, .5,
                                     .75, 1,    2.5, 5,    7.5, 10,  20, 40, 80};
constexpr double kSeconds[] = {.3, .5, .8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                               30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};
constexpr double kTokens[] = {1,   2,    5,    10,   20,    50,    100,   200,
                              500, 1000, 2000, 5000, 10000, 20000, 50000, 100000};
constexpr int kNumReasons = 5;

const char* reason_name(int reason) {
  constexpr std::array<const char*, kNumReasons> names = {"stop", "length", "abort", "deadline",
                                                          "error"};
  return names[reason];
}

struct PrometheusText {
  std::string labels, out;

  void type(const std::string& name, const char* kind, const char* help) {
    out += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, help, name, kind);
  }
  template <class Value>
  void value(const std::string& name, Value v, const std::string& more = {}) {
    out += fmt::format("{}{{{}{}}} {}\n", name, labels, more.empty() ? "" : "," + more, v);
  }
  // Writes one value under our name and vLLM's.
  template <class Value>
  void both(const char* kind, const std::string& ours, const std::string& theirs, const char* help,
            Value v) {
    for (const std::string& name : {"tandem:" + ours, "vllm:" + theirs}) {
      type(name, kind, help);
      value(name, v);
    }
  }
  void histogram(const std::string& name, const char* help, const Histogram& h) {
    for (const char* prefix : {"tandem:", "vllm:"}) {
      type(prefix + name, "histogram", help);
      out += h.text(prefix + name, labels);
    }
  }
};

std::string escaped(const std::string& label) {
  std::string out;
  for (const char c : label) {
    if (c == '\\' || c == '"') out += '\\';
    out += c == '\n' ? ' ' : c;
  }
  return out;
}

// Nothing for a single one, whose numbers are those of the engine.
void replicas_text(PrometheusText& t, const std::vector<Scheduler::Counts>& replicas) {
  const auto each = [&](const std::string& name, const char* kind, const char* help, auto value) {
    if (replicas.empty()) return;
    t.type("tandem:replica_" + name, kind, help);
    for (size_t i = 0; i < replicas.size(); ++i)
      t.value("tandem:replica_" + name, value(replicas[i]), fmt::format("replica=\"{}\"", i));
  };
  using Counts = const Scheduler::Counts&;
  each("requests_running", "gauge", "Requests that run on a replica of the backbone.",
       [](Counts s) { return s.n_running; });
  each("requests_waiting", "gauge", "Requests that wait for KV cache pages of a replica.",
       [](Counts s) { return s.n_waiting; });
  each("kv_cache_usage", "gauge", "Fraction of a replica's KV cache in use.",
       [](Counts s) { return 1 - static_cast<double>(s.n_available_pages) / s.n_pages; });
  each("prompt_tokens_total", "counter", "Prompt tokens that were dealt to a replica.",
       [](Counts s) { return s.n_prompt_tokens; });
  each("prefix_cache_hits_total", "counter", "Of these, found in the replica's prefix cache.",
       [](Counts s) { return s.n_cached_tokens; });
}

// With one rank, its share and the balancedness of the layers are left out: they are 1.
void experts_text(PrometheusText& t, const Metrics::Experts& experts) {
  const auto& [uses, homes] = experts;
  const ExpertLoads loads = loads_of(uses, homes);
  t.type("tandem:expert_window_steps", "gauge", "Steps whose uses of experts are counted.");
  t.value("tandem:expert_window_steps", uses.n_steps);
  t.type("tandem:expert_balancedness", "gauge",
         "Mean of the ranks' rows of routed experts by those of the busiest rank, of each layer; "
         "the mean of the layers, weighted by their rows. 1: all ranks have as many.");
  t.value("tandem:expert_balancedness", loads.balancedness);
  if (homes.n_ranks > 1) {
    t.type("tandem:layer_expert_balancedness", "gauge", "The same of one layer.");
    for (size_t l = 0; l < loads.layers.size(); ++l)
      if (!uses.of_layer[l].empty())
        t.value("tandem:layer_expert_balancedness", loads.layers[l].balancedness,
                fmt::format("layer=\"{}\"", l));
    double n_rows = 0;
    for (const double rows : loads.of_rank) n_rows += rows;
    t.type("tandem:rank_expert_load_share", "gauge",
           "Rows of routed experts that a rank has, of all layers, as a share of all ranks'.");
    for (size_t rank = 0; rank < loads.of_rank.size(); ++rank)
      t.value("tandem:rank_expert_load_share", n_rows > 0 ? loads.of_rank[rank] / n_rows : 0,
              fmt::format("rank=\"{}\"", rank));
  }
  if (homes.on_gpu.empty()) return;
  t.type("tandem:expert_gpu_share", "gauge",
         "Share of the rows of routed experts whose expert is in the GPU's memory.");
  t.value("tandem:expert_gpu_share", loads.gpu_share);
}

std::string labels_of(const PrefixServerStatus& server) {
  return fmt::format("prefill_server=\"{}\"", escaped(server.address));
}

// Replicas of the backbone may have links of their own to one worker.
std::string labels_of(const WorkerStatus& worker) {
  return fmt::format("{}worker=\"{}\"",
                     worker.replica < 0 ? "" : fmt::format("replica=\"{}\",", worker.replica),
                     escaped(worker.address));
}

// A metric tandem:<of>_<name> of each of some servers, by the labels with their addresses.
template <class Status, class Value>
void each_text(PrometheusText& t, const std::vector<Status>& servers, const std::string& of,
               const std::string& name, const char* kind, const char* help, Value value) {
  if (servers.empty()) return;
  const std::string metric = fmt::format("tandem:{}_{}", of, name);
  t.type(metric, kind, help);
  for (const Status& server : servers) t.value(metric, value(server), labels_of(server));
}

void prefill_text(PrometheusText& t, const std::vector<PrefixServerStatus>& servers) {
  const auto each = [&](const std::string& name, const char* kind, const char* help, auto value) {
    each_text(t, servers, "prefill_server", name, kind, help, value);
  };
  using Status = const PrefixServerStatus&;
  each("up", "gauge", "1 while a prefill server takes prompts.",
       [](Status s) { return s.is_up ? 1 : 0; });
  each("fetches_total", "counter", "Prompts whose keys a prefill server was asked for.",
       [](Status s) { return s.n_fetches; });
  each("failures_total", "counter", "How often a prefill server was lost without goodbye.",
       [](Status s) { return s.n_failures; });
  each("pages_total", "counter", "Pages of keys that came from a prefill server.",
       [](Status s) { return s.n_pages; });
  each("pending_tokens", "gauge", "Tokens of prompts whose keys have not come yet.",
       [](Status s) { return s.n_pending_tokens; });
}

void workers_text(PrometheusText& t, const std::vector<WorkerStatus>& workers) {
  const auto each = [&](const std::string& name, const char* kind, const char* help, auto value) {
    each_text(t, workers, "worker", name, kind, help, value);
  };
  using Status = const WorkerStatus&;
  each("up", "gauge", "1 while an expert worker takes requests.",
       [](Status s) { return s.is_up ? 1 : 0; });
  each("joined", "gauge", "1 for an expert worker that has joined after the start.",
       [](Status s) { return s.has_joined ? 1 : 0; });
  each("standby", "gauge", "1 for an expert worker that loads experts whose workers are lost.",
       [](Status s) { return s.is_standby ? 1 : 0; });
  each("experts", "gauge", "Experts of every layer that a worker has.",
       [](Status s) { return s.n_experts; });
  each("gpu_experts", "gauge", "Experts of every layer that are on a worker's GPU.",
       [](Status s) { return s.n_on_gpu; });
  each("loading", "gauge", "1 while a standby loads experts.",
       [](Status s) { return s.is_loading ? 1 : 0; });
  each("requests_total", "counter", "Requests for sums of experts that were sent to a worker.",
       [](Status s) { return s.n_requests; });
  each("failures_total", "counter", "How often a worker was lost without having said goodbye.",
       [](Status s) { return s.n_failures; });
  each("round_trip_seconds_total", "counter",
       "Seconds from sending a request to its answer, of all answered requests.",
       [](Status s) { return s.seconds; });
}

void engine_text(PrometheusText& t, const EngineCounts& c) {
  const Scheduler::Counts& s = c.scheduler;
  t.both("gauge", "requests_running", "num_requests_running", "Requests that are running.",
         s.n_running);
  t.both("gauge", "requests_waiting", "num_requests_waiting",
         "Requests that wait for KV cache pages.", s.n_waiting);
  t.both("gauge", "kv_cache_usage", "kv_cache_usage_perc", "Fraction of the KV cache in use.",
         1 - static_cast<double>(s.n_available_pages) / s.n_pages);
  t.both("counter", "preemptions_total", "num_preemptions_total", "Preemptions of requests.",
         s.n_preemptions);
  t.both("gauge", "requests_swapped", "num_requests_swapped",
         "Waiting requests whose pages are in host memory.", s.n_swapped);
  t.both("gauge", "host_kv_cache_usage", "cpu_cache_usage_perc",
         "Fraction of the host memory pages in use.",
         s.n_host_pages > 0 ? 1 - static_cast<double>(s.n_free_host_pages) / s.n_host_pages : 0.0);
  t.type("tandem:swaps_total", "counter", "Requests swapped to host memory or back.");
  t.value("tandem:swaps_total", s.n_swaps_out, "direction=\"out\"");
  t.value("tandem:swaps_total", s.n_swaps_in, "direction=\"in\"");
  t.both("counter", "generated_tokens_total", "generation_tokens_total", "Tokens generated.",
         c.n_generated_tokens);
  t.both("counter", "prefix_cache_queries_total", "prefix_cache_queries_total",
         "Prompt tokens looked up in the prefix cache.", s.n_prompt_tokens);
  t.both("counter", "prefix_cache_hits_total", "prefix_cache_hits_total",
         "Prompt tokens found in the prefix cache.", s.n_cached_tokens);
  t.type("tandem:fetched_prompt_tokens_total", "counter",
         "Prompt tokens whose keys another server has computed.");
  t.value("tandem:fetched_prompt_tokens_total", c.n_fetched_tokens);
  t.both("counter", "draft_tokens_total", "spec_decode_num_draft_tokens_total",
         "Drafts that were computed.", s.n_drafted_tokens);
  t.both("counter", "accepted_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
         "Drafts that were accepted.", s.n_accepted_tokens);
  replicas_text(t, c.replicas);
  t.type("tandem:steps_total", "counter", "Steps of the model.");
  t.value("tandem:steps_total", c.n_steps);
  t.type("vllm:cache_config_info", "gauge", "The KV cache.");
  t.value("vllm:cache_config_info", 1,
          fmt::format("block_size=\"{}\",num_gpu_blocks=\"{}\"", kPageSize, s.n_pages));

  for (const char* name : {"tandem:iteration_tokens_total", "vllm:iteration_tokens_total"}) {
    t.type(name, "histogram", "Tokens in a step.");
    int64_t sum = 0;
    for (int i = 0; i < EngineCounts::kStepSizes; ++i) {
      sum += c.steps_of[i];
      t.value(std::string(name) + "_bucket", sum, fmt::format("le=\"{}\"", int64_t{1} << i));
    }
    t.value(std::string(name) + "_bucket", c.n_steps, "le=\"+Inf\"");
    t.value(std::string(name) + "_sum", c.n_computed_tokens);
    t.value(std::string(name) + "_count", c.n_steps);
  }
}

}  // namespace

void Histogram::add(double value) {
  ++counts_[std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin()];
  ++n_;
  sum_ += value;
}

std::string Histogram::text(const std::string& name, const std::string& labels) const {
  std::string out;
  int64_t sum = 0;
  for (size_t i = 0; i < bounds_.size(); ++i) {
    sum += counts_[i];
    out += fmt::format("{}_bucket{{{},le=\"{}\"}} {}\n", name, labels, bounds_[i], sum);
  }
  out += fmt::format("{}_bucket{{{},le=\"+Inf\"}} {}\n", name, labels, n_);
  return out + fmt::format("{0}_sum{{{1}}} {2}\n{0}_count{{{1}}} {3}\n", name, labels, sum_, n_);
}

Metrics::Metrics()
    : first_token_(kFirstToken),
      between_tokens_(kBetweenTokens),
      total_(kSeconds),
      queue_(kSeconds),
      prefill_(kSeconds),
      decode_(kSeconds),
      prompt_tokens_(kTokens),
      generated_tokens_(kTokens),
      n_finished_(kNumReasons) {}

void Metrics::first_token(double seconds) {
  const std::lock_guard lock(mutex_);
  first_token_.add(seconds);
}

void Metrics::next_token(double seconds) {
  const std::lock_guard lock(mutex_);
  between_tokens_.add(seconds);
}

void Metrics::finished(const Finished& r) {
  const std::lock_guard lock(mutex_);
  ++n_finished_[static_cast<int>(r.reason)];
  n_prompt_tokens_ += r.prompt_tokens;
  prompt_tokens_.add(r.prompt_tokens);
  generated_tokens_.add(r.generated_tokens);
  queue_.add(r.queue_seconds);
  prefill_.add(r.prefill_seconds);
  decode_.add(r.decode_seconds);
  total_.add(r.total_seconds);
}

void Metrics::http_response(int http_status) {
  const std::lock_guard lock(mutex_);
  const auto it = std::find_if(n_responses_.begin(), n_responses_.end(),
                               [&](const auto& entry) { return entry.first == http_status; });
  if (it == n_responses_.end()) {
    n_responses_.emplace_back(http_status, 1);
  } else {
    ++it->second;
  }
}

std::string Metrics::text(const std::string& model, const EngineCounts* counts,
                          const Experts* experts, const OtherServers& others) const {
  PrometheusText t{.labels = fmt::format("model_name=\"{}\",engine=\"0\"", escaped(model)),
                   .out = {}};
  t.type("tandem:ready", "gauge", "1 once the model is loaded.");
  t.value("tandem:ready", counts ? 1 : 0);
  if (counts) engine_text(t, *counts);
  if (experts) experts_text(t, *experts);
  workers_text(t, others.workers);
  prefill_text(t, others.prefill);

  const std::lock_guard lock(mutex_);
  t.both("counter", "prompt_tokens_total", "prompt_tokens_total", "Prompt tokens of requests.",
         n_prompt_tokens_);
  for (const char* name : {"tandem:requests_total", "vllm:request_success_total"}) {
    t.type(name, "counter", "Requests that ended.");
    for (int reason = 0; reason < kNumReasons; ++reason)
      t.value(name, n_finished_[reason],
              fmt::format("finished_reason=\"{}\"", reason_name(reason)));
  }
  t.type("tandem:http_responses_total", "counter", "Answers by HTTP status.");
  for (const auto& [status, n] : n_responses_)
    t.value("tandem:http_responses_total", n, fmt::format("status=\"{}\"", status));
  t.histogram("time_to_first_token_seconds", "From request to first token.", first_token_);
  t.histogram("time_per_output_token_seconds", "Between tokens.", between_tokens_);
  t.histogram("inter_token_latency_seconds", "Between tokens.", between_tokens_);
  t.histogram("e2e_request_latency_seconds", "From request to last token.", total_);
  t.histogram("request_queue_time_seconds", "From request to its first step.", queue_);
  t.histogram("request_prefill_time_seconds", "From first step to first token.", prefill_);
  t.histogram("request_decode_time_seconds", "From first token to last.", decode_);
  t.histogram("request_prompt_tokens", "Prompt tokens of a request.", prompt_tokens_);
  t.histogram("request_generation_tokens", "Generated tokens of a request.", generated_tokens_);
  return std::move(t.out);
}

}  // namespace tandem
