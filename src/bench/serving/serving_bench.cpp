#include "bench/serving/serving_bench.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <thread>

#include "core/check.h"
#include "io/json.h"

namespace tandem {
namespace {

struct Backend {
  const char* name;
  ServingApi api;
  int port;
  bool is_sglang;
};
constexpr Backend kBackends[] = {
    {"sglang", ServingApi::kGenerate, 30000, true},
    {"sglang-native", ServingApi::kGenerate, 30000, true},
    {"sglang-oai", ServingApi::kCompletions, 30000, true},
    {"sglang-oai-chat", ServingApi::kChat, 30000, true},
    {"vllm", ServingApi::kCompletions, 8000, false},
    {"vllm-chat", ServingApi::kChat, 30000, false},
    {"lmdeploy", ServingApi::kCompletions, 23333, false},
    {"lmdeploy-chat", ServingApi::kChat, 30000, false},
};

const Backend& backend_of(const std::string& name) {
  std::string names;
  for (const Backend& backend : kBackends) {
    if (name == backend.name) return backend;
    names += (names.empty() ? "" : ", ") + std::string(backend.name);
  }
  fail("--backend {}: must be one of {}", name, names);
}

void require_sane(const ServingBenchOptions& o) {
  const DatasetOptions& d = o.dataset;
  require(d.name == "sharegpt" || d.name == "random" || d.name == "random-ids",
          "--dataset-name {}: must be sharegpt, random or random-ids", d.name);
  const auto require_count = [](const char* option, int n, int least) {
    require(n >= least && n <= kMaxServingCount, "{} {}: must be between {} and {}", option, n,
            least, kMaxServingCount);
  };
  require_count("--num-prompts", d.n_prompts, 1);
  require_count("--random-input-len", d.input_tokens, 1);
  require_count("--random-output-len", d.output_tokens, 1);
  require_count("--warmup-requests", o.warmup_requests, 0);
  if (d.sharegpt_output_tokens)
    require_count("--sharegpt-output-len", *d.sharegpt_output_tokens, 4);
  if (d.sharegpt_context) require_count("--sharegpt-context-len", *d.sharegpt_context, 4);
  if (o.max_concurrency) require_count("--max-concurrency", *o.max_concurrency, 1);
  for (const int n : o.concurrency) {
    require_count("--concurrency", n, 1);
    require(n <= d.n_prompts, "--concurrency {}: needs --num-prompts {} or more", n, n);
  }
  for (const double speed : o.slo_tokens_a_user)
    require(speed > 0 && speed < 1e6, "--slo-tps-user {}: must be above 0", speed);
  require(!o.slo_ttft || (*o.slo_ttft > 0 && *o.slo_ttft < 1e6),
          "--slo-ttft {}: must be above 0 seconds", o.slo_ttft.value_or(0));
  require(o.n_gpus >= 0 && o.n_gpus <= kMaxServingCount, "--gpus {}: must be between 0 and {}",
          o.n_gpus, kMaxServingCount);
  require(d.range_ratio >= 0 && d.range_ratio <= 1,
          "--random-range-ratio {}: must be between 0 and 1", d.range_ratio);
  require(o.request_rate > 0, "--request-rate {}: must be above 0, or inf", o.request_rate);
  require(!o.port || (*o.port > 0 && *o.port < 65536), "--port {}: must be between 1 and 65535",
          o.port.value_or(0));
  require(!d.sends_ids || o.backend == "sglang", "--tokenize-prompt: only with --backend sglang");
}

std::string output_file_of(const ServingBenchOptions& o) {
  if (!o.output_file.empty()) return o.output_file;
  const std::time_t now = std::time(nullptr);
  const std::string head =
      fmt::format("{}_{:%m%d}_{}", o.backend, fmt::localtime(now), o.dataset.n_prompts);
  if (o.dataset.name == "sharegpt") return head + "_sharegpt.jsonl";
  return fmt::format("{}_{}_{}.jsonl", head, o.dataset.input_tokens, o.dataset.output_tokens);
}

void append(const std::string& file, const std::string& text) {
  std::ofstream out(file, std::ios::app);
  require(out.is_open() && (out << text).flush().good(), "--output-file {}: cannot be written",
          file);
}

Tokenizer tokenizer_of(const std::string& directory) {
  try {
    return Tokenizer::from_directory(directory);
  } catch (const Error& error) {
    fail("no tokenizer in {}: {}: give --tokenizer, the directory of the model that is served",
         shown(directory), error.what());
  }
}

nlohmann::ordered_json object_of(const std::string& text) {
  if (text.empty()) return nlohmann::ordered_json::object();
  auto json = nlohmann::ordered_json::parse(text, nullptr, false);
  require(json.is_object(), "--extra-request-body {}: must be a JSON object", shown(text));
  return json;
}

}  // namespace

ServingBench::ServingBench(const ServingBenchOptions& options,
                           std::function<void(const std::string&)> say)
    : options_(options), say_(std::move(say)), numpy_(options.seed) {
  require_sane(options);
  const Backend& backend = backend_of(options.backend);
  const std::string url =
      options.base_url.empty()
          ? fmt::format("http://{}:{}", options.host, options.port.value_or(backend.port))
          : options.base_url;
  const char* key = std::getenv("OPENAI_API_KEY");
  load_ = {.server = parse_address(url),
           .api = backend.api,
           .model = options.model,
           .api_key = key ? key : "",
           .streams = !options.disable_stream,
           .ignore_eos = !options.disable_ignore_eos,
           .logprobs = options.return_logprob,
           .extra_body = object_of(options.extra_request_body),
           .rate = options.request_rate,
           .shows_progress = !options.disable_tqdm};
  output_file_ = output_file_of(options);
  append(output_file_, "");
  ask_for_model();
  const std::string directory = options.tokenizer.empty() ? load_.model : options.tokenizer;
  tokenizer_ = tokenizer_of(directory);
  PythonRandom python(options.seed);
  requests_ = make_dataset(options.dataset, *tokenizer_, base_tokens(directory, *tokenizer_),
                           python, numpy_);
  require(!requests_.empty(), "{}: no conversation has the lengths asked for",
          options.dataset.path);
  int64_t n_input = 0, n_output = 0;
  for (const ServingRequest& request : requests_) {
    n_input += request.prompt_tokens;
    n_output += request.output_tokens;
  }
  say_(fmt::format("#Input tokens: {}", n_input));
  say_(fmt::format("#Output tokens: {}", n_output));
}

ServingBench::Run ServingBench::run(std::optional<int> concurrency, size_t n_requests) {
  load_.most_at_once = concurrency.value_or(0);
  if (options_.warmup_requests > 0) warm_up();
  if (options_.flush_cache) flush_cache();
  std::this_thread::sleep_for(std::chrono::seconds(1));  // as in the original

  NumpyRandom gaps = numpy_;  // the same gaps in every run
  const ServingLoadResult result = run_load(load_, std::span(requests_).first(n_requests), gaps);
  ServingMetrics metrics = metrics_of(result.outputs, result.seconds, *tokenizer_);
  if (!result.interrupted) metrics.accept_length = accept_length();
  const ServingSetup setup = {.backend = options_.backend,
                              .dataset = options_.dataset.name,
                              .request_rate = options_.request_rate,
                              .concurrency = concurrency,
                              .sharegpt_output_tokens = options_.dataset.sharegpt_output_tokens,
                              .input_tokens = options_.dataset.input_tokens,
                              .output_tokens = options_.dataset.output_tokens,
                              .range_ratio = options_.dataset.range_ratio,
                              .simulated_routing = simulated_routing_};
  Run run = {.metrics = metrics,
             .report = report_text(setup, metrics),
             .json = report_json(setup, metrics),
             .interrupted = result.interrupted,
             .first_error = ""};
  for (const ServingOutput& output : result.outputs)
    if (run.first_error.empty()) run.first_error = output.error;
  append(output_file_,
         options_.output_details ? report_json(setup, metrics, result.outputs) : run.json);
  return run;
}

size_t ServingBench::requests_for(int concurrency) const {
  const auto four_rounds = static_cast<size_t>(concurrency) * 4;
  return std::min(requests_.size(), std::max<size_t>(16, four_rounds));
}

// What the server says of its first model: its name, unless --model gives one, and whether routing
// is simulated. Only the name is required.
void ServingBench::ask_for_model() {
  ServerReply reply;
  try {
    reply = ask_server(load_, "GET", "/v1/models");
  } catch (const std::runtime_error&) {
    if (load_.model.empty()) throw;
    return;  // the warm-up reports a server that is not there
  }
  const auto list = nlohmann::json::parse(reply.body, nullptr, false);
  const auto find = [&](const char* path) {
    const nlohmann::json::json_pointer at(path);
    return reply.status == 200 && list.is_object() && list.contains(at) ? list[at]
                                                                        : nlohmann::json();
  };
  const nlohmann::json id = find("/data/0/id"), routing = find("/data/0/simulated_routing");
  if (routing.is_string()) simulated_routing_ = routing;
  if (!load_.model.empty()) return;
  if (!id.is_string())
    throw std::runtime_error(fmt::format("{}/v1/models answers {} {}: {}: give --model",
                                         load_.server.url(), reply.status, reply.reason,
                                         shown(reply.body)));
  load_.model = id.get<std::string>();
}

void ServingBench::warm_up() {
  say_(fmt::format("Starting warmup with {} sequences...", options_.warmup_requests));
  std::vector<ServingRequest> first(static_cast<size_t>(options_.warmup_requests), requests_[0]);
  for (ServingRequest& request : first) request.output_tokens = std::min(request.output_tokens, 32);
  ServingLoadOptions load = load_;
  load.rate = std::numeric_limits<double>::infinity();
  load.shows_progress = false;
  NumpyRandom unused(0);
  const ServingLoadResult result = run_load(load, first, unused);
  const bool any = std::any_of(result.outputs.begin(), result.outputs.end(),
                               [](const ServingOutput& o) { return o.success; });
  if (!any)
    throw std::runtime_error(
        fmt::format("the warm-up failed at {}: {}", load_.server.url(),
                    result.interrupted ? "interrupted" : result.outputs[0].error));
  say_(fmt::format("Warmup completed with {} sequences. Starting main benchmark run...",
                   options_.warmup_requests));
}

void ServingBench::flush_cache() const {
  const char* path = options_.backend.starts_with("vllm")     ? "/reset_prefix_cache"
                     : options_.backend.starts_with("sglang") ? "/flush_cache?timeout=60.0"
                                                              : "/flush_cache";
  const ServerReply reply = ask_server(load_, "POST", path);
  if (reply.status >= 400)
    throw std::runtime_error(fmt::format("--flush-cache: {}{} answers {} {}: {}",
                                         load_.server.url(), path, reply.status, reply.reason,
                                         shown(reply.body)));
}

// Only SGLang reports it.
std::optional<double> ServingBench::accept_length() const {
  if (!backend_of(options_.backend).is_sglang) return {};
  const ServerReply reply = ask_server(load_, "GET", "/server_info");
  const auto json = nlohmann::json::parse(reply.body, nullptr, false);
  for (const char* path : {"/decode/0/internal_states/0/avg_spec_accept_length",
                           "/internal_states/0/avg_spec_accept_length"}) {
    const nlohmann::json::json_pointer at(path);
    if (reply.status == 200 && json.is_object() && json.contains(at) && json[at].is_number())
      return json[at].get<double>();
  }
  return {};
}

int highest_that(int most, const std::function<bool(int)>& ok) {
  int good = 0, bad = most + 1;
  for (int next = 1; good < most && bad > most; next = std::min(2 * next, most)) {
    if (ok(next))
      good = next;
    else
      bad = next;
  }
  while (bad - good > std::max(1, good / 20)) {
    const int middle = good + (bad - good) / 2;
    (ok(middle) ? good : bad) = middle;
  }
  return good;
}

}  // namespace tandem
