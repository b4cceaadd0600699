#include "server/service.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <random>

#include "core/check.h"
#include "http/api_key.h"
#include "io/json.h"
#include "server/openapi.h"
#include "server/page/page.h"
#include "server/request_fields.h"

namespace tandem {
namespace {

// Answers per request. Every answer takes memory from the start, even while it waits.
constexpr size_t kMaxTotalAnswers = 4096;

constexpr const char* kVersion = "0.1.0";
constexpr std::string_view kModelsPath = "/v1/models", kModelPath = "/v1/models/";

// All paths. openapi.json documents them, and serve_test.py compares the two lists.
constexpr std::array<std::string_view, 6> kPublicPaths = {"/",        "/health",  "/ping",
                                                          "/version", "/metrics", "/openapi.json"};
constexpr std::array<std::string_view, 6> kGetPaths = {
    kModelsPath, "/get_server_info", "/server_info", "/get_model_info", "/experts", "/rebalance"};
constexpr std::array<std::string_view, 8> kPostPaths = {
    "/v1/completions", "/v1/chat/completions", "/generate",           "/tokenize",
    "/detokenize",     "/flush_cache",         "/reset_prefix_cache", "/rebalance"};

uint64_t random_number() {
  thread_local std::mt19937_64 generator{std::random_device{}()};
  return generator();
}

nlohmann::ordered_json parse_body(const std::string& body) {
  try {
    return parse_ordered_json(body, "the request's body");
  } catch (const Error& error) {
    throw ApiError(400, error.what());
  }
}

HttpResponse json_response(const OrderedJson& json) {
  return {.status = 200, .body = dump_json(json)};
}

OrderedJson expert_layer_json(const ExpertHomes& homes, const ExpertUses& uses,
                              const ExpertLoads& loads, int layer) {
  OrderedJson json = {{"layer", layer},
                      {"balancedness", loads.layers[layer].balancedness},
                      {"counts", uses.of_layer[layer]},
                      {"ranks", nullptr}};
  if (homes.n_ranks > 1) json["ranks"] = homes.ranks[layer];
  if (homes.on_gpu.empty()) return json;
  json["gpu"] = OrderedJson::array();
  for (size_t e = 0; e < homes.on_gpu[layer].size(); ++e)
    if (homes.on_gpu[layer][e]) json["gpu"].push_back(e);
  json["gpu_share"] = loads.layers[layer].gpu_share;
  return json;
}

bool contains(std::span<const std::string_view> paths, std::string_view path) {
  return std::find(paths.begin(), paths.end(), path) != paths.end();
}

}  // namespace

Service::Service(const Tokenizer& tokenizer, std::unique_ptr<ChatFormat> chat,
                 SamplingDefaults defaults, Options options)
    : tokenizer_(tokenizer),
      chat_(std::move(chat)),
      defaults_(defaults),
      grammars_(tokenizer, chat_.get()),
      options_(std::move(options)),
      created_(seconds_since_1970()) {}

Service::Result Service::handle(const HttpRequest& request) noexcept {
  try {
    return route_or_error(request);
  } catch (const std::exception&) {  // not even enough memory for an error message
    return HttpResponse{.status = 500};
  }
}

Service::Result Service::route_or_error(const HttpRequest& request) {
  try {
    return route(request);
  } catch (const ApiError& error) {
    return error_response(error);
  } catch (const std::exception& error) {
    return error_response(ApiError(500, error.what()));
  }
}

// A known path with another method is answered with 405 and the allowed methods.
Service::Result Service::route(const HttpRequest& request) {
  const bool allows_get = contains(kGetPaths, request.path) ||
                          contains(kPublicPaths, request.path) ||
                          request.path.compare(0, kModelPath.size(), kModelPath) == 0;
  const bool allows_post = contains(kPostPaths, request.path);
  if (!allows_get && !allows_post)
    throw ApiError(404, fmt::format("{} {} does not exist", request.method, shown(request.path)));
  if (allows_get && (request.method == "GET" || request.method == "HEAD")) return get(request);
  if (allows_post && request.method == "POST") return post(request);
  const bool is_preflight = !request.cors.requested_method.empty() && !cors(request).empty();
  if (request.method == "OPTIONS" && is_preflight) return HttpResponse{};
  HttpResponse response = error_response(
      ApiError(405, fmt::format("{} {} is not allowed", request.method, shown(request.path))));
  response.allow = !allows_get ? "POST" : allows_post ? "GET, HEAD, POST" : "GET, HEAD";
  return response;
}

// Paths for monitoring need no key.
Service::Result Service::get(const HttpRequest& request) {
  const std::string& path = request.path;
  if (!contains(kPublicPaths, path)) require_api_key(request.authorization, options_.api_key);
  if (path == "/health" || path == "/ping") return health();
  if (path == "/") return HttpResponse{200, std::string(page()), "text/html; charset=utf-8"};
  if (path == "/version") return json_response({{"version", kVersion}});
  if (path == "/openapi.json") return HttpResponse{200, std::string(openapi())};
  if (path == "/metrics") return metrics();
  if (path == "/experts") return experts();
  if (path == "/rebalance") return rebalance_report();
  if (path.compare(0, kModelsPath.size(), kModelsPath) == 0) return models(path);
  return server_info();
}

Service::Result Service::post(const HttpRequest& request) {
  require_api_key(request.authorization, options_.api_key);
  const std::string& path = request.path;
  if (path == "/v1/completions")
    return generation(parse_completion_request(parse_body(request.body), defaults_));
  if (path == "/v1/chat/completions")
    return generation(parse_chat_request(parse_body(request.body), defaults_));
  if (path == "/generate")
    return generation(parse_generate_request(parse_body(request.body), defaults_));
  if (path == "/tokenize") return tokenize(parse_body(request.body));
  if (path == "/detokenize") return detokenize(parse_body(request.body));
  if (path == "/rebalance") return rebalance();
  engine().forget_pages();
  return HttpResponse{200, "the prefix cache has been emptied\n", "text/plain; charset=utf-8"};
}

HttpResponse Service::metrics() const {
  Engine* engine = engine_;
  std::optional<EngineCounts> counts;
  if (engine) counts = engine->counts();
  const auto uses = engine ? engine->expert_uses() : nullptr;
  std::optional<Metrics::Experts> experts;
  const auto homes = engine ? engine->expert_homes() : nullptr;
  if (uses) experts.emplace(Metrics::Experts{*uses, *homes});
  OtherServers others;
  if (engine) others = {engine->workers(), engine->prefix_servers()};
  return {200,
          metrics_.text(options_.model_id, counts ? &*counts : nullptr,
                        experts ? &*experts : nullptr, others),
          "text/plain; version=0.0.4; charset=utf-8"};
}

// How often each routed expert was chosen, and where it is.
HttpResponse Service::experts() {
  const Engine& running = engine();
  const auto uses = running.expert_uses();
  if (!uses)
    throw ApiError(404,
                   "uses of experts are not counted: start the server with a --balance-window "
                   "above 0",
                   {}, "not_counted");
  const std::shared_ptr<const ExpertHomes> homes = running.expert_homes();
  const ExpertLoads loads = loads_of(*uses, *homes);
  OrderedJson layers = OrderedJson::array();
  for (int layer = 0; layer < std::ssize(uses->of_layer); ++layer)
    if (!uses->of_layer[layer].empty())
      layers.push_back(expert_layer_json(*homes, *uses, loads, layer));
  OrderedJson json = {{"window_steps", running.expert_window()},
                      {"steps", uses->n_steps},
                      {"tokens", uses->n_tokens},
                      {"balancedness", loads.balancedness},
                      {"load", loads.of_rank}};
  if (!homes->on_gpu.empty()) json["gpu_share"] = loads.gpu_share;
  json["layers"] = std::move(layers);
  return json_response(json);
}

Engine& Service::rebalancing_engine() {
  Engine& running = engine();
  if (!running.rebalances())
    throw ApiError(
        404,
        "experts do not move: start the server on several ranks, or with workers, with --rebalance "
        "on-request or auto, or with a GPU and the CPU beside it with --hot-experts live",
        {}, "not_rebalancing");
  return running;
}

// Experts move while answers go on: GET /rebalance tells how far they are.
HttpResponse Service::rebalance() {
  Engine& running = rebalancing_engine();
  bool begins = false;
  try {
    begins = running.rebalance();
  } catch (const Error& error) {
    throw ApiError(409, error.what(), {}, "nothing_counted");
  }
  if (!begins)
    throw ApiError(409, "a rebalance is in progress: GET /rebalance tells how far it is", {},
                   "in_progress");
  HttpResponse response = rebalance_report();
  response.status = 202;
  return response;
}

HttpResponse Service::rebalance_report() {
  const Engine& running = rebalancing_engine();
  const RebalanceReport report = running.rebalance_report();
  const std::string what =
      running.expert_homes()->exchanges_with_gpu() ? "gpu_share" : "balancedness";
  OrderedJson json = {{"state", name_of(report.state)},
                      {"number", report.number},
                      {"layers", report.n_layers},
                      {"experts", report.n_experts},
                      {"bytes", report.n_bytes},
                      {"waves", report.n_waves},
                      {"waves_moved", report.n_waves_moved},
                      {what + "_before", report.before},
                      {what + "_after", report.after},
                      {"plan_seconds", report.plan_seconds},
                      {"load_seconds", report.load_seconds},
                      {"prepare_seconds", report.prepare_seconds},
                      {"longest_pause_seconds", report.longest_pause_seconds}};
  if (!report.error.empty()) json["error"] = report.error;
  return json_response(json);
}

HttpResponse Service::models(const std::string& path) {
  const OrderedJson list = models_json(options_.model_id, options_.root, engine().context(),
                                       created_, options_.role, options_.simulated_routing);
  if (path == kModelsPath) return json_response(list);
  const std::string id = path.substr(kModelPath.size());
  // Clients write an id that contains slashes with "%2F".
  if (id != options_.model_id && percent_decoded(id) != options_.model_id)
    throw ApiError(404, fmt::format("the model {} does not exist", shown(id)), "model",
                   "model_not_found");
  return json_response(list["data"][0]);
}

Engine& Service::engine() {
  if (stopping_) throw ApiError(503, "the server is stopping", {}, "stopping");
  Engine* engine = engine_;
  if (!engine)
    throw ApiError(503,
                   fmt::format("the model is loading, {:.0f} % done: try again later",
                               100 * loaded_fraction_.load()),
                   {}, "loading");
  return *engine;
}

std::shared_ptr<Generation> Service::generation(GenerationRequest request) {
  const auto received = Clock::now();
  Engine& running = engine();
  if (!request.model.empty() && request.model != options_.model_id)
    throw ApiError(404,
                   fmt::format("the model {} is not served here, only {}", shown(request.model),
                               shown(options_.model_id)),
                   "model", "model_not_found");
  const size_t n_answers = std::max<size_t>(request.prompts.size(), 1) * request.n;
  if (n_answers > kMaxTotalAnswers)
    throw ApiError(400,
                   fmt::format("the request asks for {} answers: must be at most {}", n_answers,
                               kMaxTotalAnswers),
                   request.n > 1 ? "n" : "prompt");
  auto prompts = prompts_of(request);
  for (const auto& prompt : prompts) require_context_fits(request, prompt.size());
  if (!request.has_seed) request.sampling.seed = random_number();
  const char* prefix = request.endpoint == Endpoint::kChat ? "chatcmpl" : "cmpl";
  const AnswerInfo info = {
      .endpoint = request.endpoint,
      .id = fmt::format("{}-{:016x}{:016x}", prefix, random_number(), random_number()),
      .model = options_.model_id,
      .created = seconds_since_1970()};
  const bool splits = request.endpoint == Endpoint::kChat && request.reasoning &&
                      tokenizer_.added_id("</think>").has_value();
  const bool starts_in_reasoning =
      request.endpoint == Endpoint::kChat && opens_thinking(tokenizer_, prompts.front());
  auto grammar = grammars_.get(request, starts_in_reasoning);
  const bool parses_tool_calls = !request.tools.is_null();
  // The sources of the prompts and the grammar may be large, so free them: an answer may take long.
  request.messages = request.template_arguments = request.tools = nullptr;
  request.prompts.clear();
  request.response_format = {};
  return std::make_shared<Generation>(Generation::Setup{.request = std::move(request),
                                                        .info = info,
                                                        .prompts = std::move(prompts),
                                                        .splits_reasoning = splits,
                                                        .parses_tool_calls = parses_tool_calls,
                                                        .grammar = std::move(grammar),
                                                        .starts_in_reasoning = starts_in_reasoning,
                                                        .received = received},
                                      running, tokenizer_, metrics_, options_.log);
}

std::vector<std::vector<int32_t>> Service::prompts_of(const GenerationRequest& request) const {
  if (request.endpoint == Endpoint::kChat) return {chat_prompt(request)};
  std::vector<std::vector<int32_t>> prompts;
  for (const Prompt& prompt : request.prompts) {
    const auto* ids = std::get_if<std::vector<int32_t>>(&prompt);
    prompts.push_back(ids ? *ids
                          : text_prompt(std::get<std::string>(prompt), request.add_special_tokens));
    if (prompts.back().empty()) throw ApiError(400, "the prompt is empty", "prompt");
    for (const int32_t id : prompts.back())
      if (!tokenizer_.has_token(id))
        throw ApiError(400, fmt::format("token {} is not in the vocabulary", id), "prompt");
  }
  return prompts;
}

std::vector<int32_t> Service::text_prompt(const std::string& text, bool add_special_tokens) const {
  try {
    return add_special_tokens ? raw_prompt(tokenizer_, text) : tokenizer_.encode(text);
  } catch (const Error& error) {
    throw ApiError(400, error.what(), "prompt");
  }
}

std::vector<int32_t> Service::chat_prompt(const GenerationRequest& request) const {
  if (!chat_)
    throw ApiError(400, "the model has no chat template: use /v1/completions", "messages");
  ChatOptions options;
  options.add_generation_prompt = request.add_generation_prompt;
  options.extra = request.template_arguments;
  options.tools = request.tools;
  try {
    return chat_->prompt(request.messages, options);
  } catch (const Error& error) {
    throw ApiError(400, error.what(), "messages");
  }
}

void Service::require_context_fits(const GenerationRequest& request, size_t n_prompt) const {
  const int64_t context = engine_.load()->context();
  const auto n = static_cast<int64_t>(n_prompt);
  const int64_t n_new = request.max_tokens.value_or(1);
  if (n + n_new <= context) return;
  throw ApiError(400,
                 fmt::format("This model's maximum context length is {} tokens. However, you "
                             "requested {} tokens ({} in the prompt, {} in the completion). Please "
                             "reduce the length of the prompt or of the completion.",
                             context, n + n_new, n, n_new),
                 request.endpoint == Endpoint::kChat ? "messages" : "prompt",
                 "context_length_exceeded");
}

HttpResponse Service::health() const {
  if (stopping_) return {503, dump_json({{"status", "stopping"}})};
  if (const Engine* engine = engine_.load()) {
    OrderedJson json = {{"status", "ready"}};
    const BackboneGrid& grid = engine->grid();
    if (grid.n_ranks() > 1) {  // all of them answer: otherwise this process has ended
      json["ranks"] = grid.n_ranks();
      json["replicas"] = grid.n_replicas;
    }
    return {200, dump_json(json)};
  }
  return {503, dump_json({{"status", "loading"}, {"loaded", loaded_fraction_.load()}})};
}

HttpResponse Service::server_info() const {
  OrderedJson json = {{"model_path", options_.root},
                      {"served_model_name", options_.model_id},
                      {"version", kVersion},
                      {"internal_states", OrderedJson::array({OrderedJson::object()})}};
  if (Engine* engine = engine_.load()) {
    const Scheduler::Counts counts = engine->counts().scheduler;
    json["context_length"] = engine->context();
    json["kv_tokens"] = int64_t{counts.n_pages} * kPageSize;
    json["dp_size"] = engine->grid().n_replicas;
    json["tp_size"] = engine->grid().tp;
  }
  return json_response(json);
}

HttpResponse Service::tokenize(const nlohmann::ordered_json& json) const {
  const RequestFields fields(json);
  std::vector<int32_t> ids;
  const bool add_special_tokens = fields.boolean("add_special_tokens", true);
  const std::string prompt = fields.string("prompt", "");
  if (fields.find("messages")) {  // special tokens come from the chat template
    ids = chat_prompt(parse_chat_request(json, defaults_));
  } else {
    if (!fields.find("prompt")) fields.refuse("prompt", "given, unless messages are");
    ids = text_prompt(prompt, add_special_tokens);
  }
  OrderedJson response = {{"count", ids.size()}, {"tokens", ids}};
  if (Engine* engine = engine_.load()) response["max_model_len"] = engine->context();
  return json_response(response);
}

HttpResponse Service::detokenize(const nlohmann::ordered_json& json) const {
  const RequestFields fields(json);
  if (!fields.find("tokens")) fields.refuse("tokens", "a list of token ids");
  const std::vector<int32_t> ids = fields.ids("tokens");
  for (const int32_t id : ids)
    if (!tokenizer_.has_token(id))
      throw ApiError(400, fmt::format("token {} is not in the vocabulary", id), "tokens");
  return json_response({{"prompt", tokenizer_.decode(ids)}});
}

HttpResponse Service::error_response(const ApiError& error) {
  return {.status = error.status,
          .body = dump_json(error_json(error)),
          .content_type = "application/json",
          .retry_after_seconds = error.status == 503 ? 5 : 0};
}

}  // namespace tandem
