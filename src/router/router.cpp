#include "router/router.h"

#include <fmt/format.h>

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>

#include "core/check.h"
#include "http/api_key.h"
#include "io/json.h"
#include "router/backend_list.h"
#include "router/reports.h"
#include "server/answer_json.h"

namespace tandem {
namespace {

namespace asio = boost::asio;

constexpr std::string_view kModelPath = "/v1/models/";
constexpr int64_t kMaxFileBytes = 1 << 20;
constexpr std::chrono::seconds kFilePeriod{1};  // the file of backends is read so often
// A registered backend that does not answer for so long is forgotten.
constexpr std::chrono::seconds kForgetAfter{300};

// Paths of backends that need no key there and here.
constexpr std::array<std::string_view, 3> kPublicPaths = {"/", "/version", "/openapi.json"};
// Requests whose time tells how fast a backend is.
constexpr std::array<std::string_view, 3> kGeneratingPaths = {"/v1/completions",
                                                              "/v1/chat/completions", "/generate"};
// What concerns one backend, which `?backend=` has to name if there are several.
constexpr std::array<std::string_view, 4> kBackendPaths = {"/flush_cache", "/reset_prefix_cache",
                                                           "/experts", "/rebalance"};

template <size_t kN>
bool contains(const std::array<std::string_view, kN>& paths, std::string_view path) {
  return std::find(paths.begin(), paths.end(), path) != paths.end();
}

// The value of a parameter of a query; empty: it has none.
std::string parameter(std::string_view query, std::string_view name) {
  while (!query.empty()) {
    const std::string_view pair = query.substr(0, query.find('&'));
    query.remove_prefix(std::min(pair.size() + 1, query.size()));
    if (pair.size() > name.size() && pair.starts_with(name) && pair[name.size()] == '=')
      return percent_decoded(pair.substr(name.size() + 1));
  }
  return "";
}

// The address of a backend as a request names it.
HttpAddress address_in(const std::string& text, const std::string& field) {
  if (text.empty())
    throw ApiError(
        400,
        fmt::format("{} is missing: it names a backend, http://HOST:PORT or https://HOST:PORT",
                    field),
        field);
  try {
    return parse_http_address(text, field);
  } catch (const Error& error) {
    throw ApiError(400, error.what(), field);
  }
}

HttpResponse json_response(const OrderedJson& json, int status = 200) {
  return {.status = status, .body = dump_json(json)};
}

// An answer of the router itself, made on the I/O thread, which has the backends' state.
class OwnAnswer final : public RelayedAnswer {
 public:
  OwnAnswer(std::function<HttpResponse(const HttpRequest&)> answer, HttpRequest request)
      : answer_(std::move(answer)), request_(std::move(request)) {}
  asio::awaitable<bool> write_to(AnswerWriter& client) override {
    HttpResponse response = answer_(request_);
    co_await client.respond(std::move(response));
    co_return true;
  }
  void cancel() override {}

 private:
  const std::function<HttpResponse(const HttpRequest&)> answer_;
  const HttpRequest request_;
};

}  // namespace

// A path of the router.
struct Router::Own {
  std::string_view method, path;
  bool is_public;
  HttpResponse (Router::*answer)(const HttpRequest&);
};

std::span<const Router::Own> Router::own_paths() {
  static constexpr std::array<Own, 10> kOwn = {
      {{"GET", "/health", true, &Router::health},
       {"GET", "/ping", true, &Router::health},
       {"GET", "/metrics", true, &Router::metrics},
       {"GET", "/v1/models", false, &Router::models},
       {"GET", "/backends", false, &Router::backends},
       {"POST", "/backends/drain", false, &Router::drain},
       {"POST", "/backends/undrain", false, &Router::drain},
       {"POST", "/nodes/add", false, &Router::add_node},
       {"POST", "/nodes/remove", false, &Router::remove_node},
       {"GET", "/nodes/status", false, &Router::nodes}}};
  return kOwn;
}

Router::Router(Options options, const std::vector<HttpAddress>& backends)
    : options_(std::move(options)),
      trust_(trusting_context(options_.backend_ca, "--backend-ca")),
      checks_(pool_, trust_,
              {.interval = options_.check_interval,
               .most = options_.check_most,
               .api_key =
                   options_.backend_api_key.empty() ? options_.api_key : options_.backend_api_key,
               .log = options_.log}),
      context_{.pool = pool_,
               .trust = trust_,
               .backend_api_key = options_.backend_api_key,
               .replaces_cors = !options_.cors_origins.empty(),
               .connect_most = options_.connect_most,
               .first_byte_most = options_.first_byte_most,
               .on_failure = [this](const auto& backend, const std::string& why) {
                 checks_.on_failure(backend, why);
               }} {
  pool_.set_listed(backends, RouterClock::now());
  if (options_.backends_file.empty()) return;
  file_text_ = read_text_file(options_.backends_file, kMaxFileBytes);
  pool_.set_listed(parse_backends_file(file_text_, options_.backends_file), RouterClock::now());
}

void Router::begin(const asio::any_io_executor& executor) {
  context_.executor = executor;
  pool_.on_added = [this, executor](const auto& backend) { checks_.start(executor, backend); };
  for (const auto& backend : pool_.all()) checks_.start(executor, backend);
  asio::co_spawn(
      executor, [this, executor] { return keep_house(executor); }, asio::detached);
}

void Router::end() {
  context_.closed = true;
  pool_.on_added = [](const auto&) {};
  for (const auto& backend : pool_.all()) {
    backend->check_now = [] {};
    backend->idle.clear();
  }
}

Router::Result Router::handle(const HttpRequest& request) noexcept {
  try {
    return route(request);
  } catch (const ApiError& error) {
    return error_response(error);
  } catch (const std::exception&) {  // such as out of memory
    return HttpResponse{.status = 500};
  }
}

Router::Result Router::route(const HttpRequest& request) {
  if (request.method == "OPTIONS" && !request.cors.requested_method.empty() &&
      !cors(request).empty())
    return HttpResponse{};
  const bool is_head = request.method == "HEAD";
  std::string allowed;
  for (const Own& own : own_paths()) {
    const bool is_this = request.path == own.path ||
                         (own.path == "/v1/models" && request.path.starts_with(kModelPath));
    if (!is_this) continue;
    if (request.method == own.method || (is_head && own.method == "GET"))
      return answer_own(own, request);
    allowed = own.method == "GET" ? "GET, HEAD" : "POST";
  }
  if (allowed.empty()) return forward(request);
  HttpResponse response = error_response(
      ApiError(405, fmt::format("{} {} is not allowed", request.method, shown(request.path))));
  response.allow = allowed;
  return response;
}

Router::Result Router::answer_own(const Own& own, const HttpRequest& request) {
  if (!own.is_public) require_api_key(request.authorization, options_.api_key);
  const auto answer = [this, function = own.answer](const HttpRequest& r) {
    try {
      return (this->*function)(r);
    } catch (const ApiError& error) {
      return error_response(error);
    }
  };
  return std::make_shared<OwnAnswer>(answer, request);
}

// May run on a worker thread, which reads the body; the state of backends is the I/O thread's.
Router::Result Router::forward(const HttpRequest& request) {
  const bool is_public =
      contains(kPublicPaths, request.path) && (request.method == "GET" || request.method == "HEAD");
  if (!is_public && request.method != "OPTIONS")
    require_api_key(request.authorization, options_.api_key);
  std::vector<std::string> without;
  if (!options_.backend_api_key.empty()) without.emplace_back("authorization");
  ForwardedRequest forwarded{
      .method = request.method,
      .target = request.query.empty() ? request.path : request.path + "?" + request.query,
      .fields = forwarded_fields(request.fields, without),
      .body = request.body,
      .generates = contains(kGeneratingPaths, request.path)};
  if (request.method == "POST") forwarded.summary = summary_of(request.body);
  if (contains(kBackendPaths, request.path)) {
    const std::string named = parameter(request.query, "backend");
    if (!named.empty()) forwarded.backend = address_in(named, "backend").authority;
    forwarded.needs_backend = true;
  }
  return std::make_shared<Forwarding>(context_, std::move(forwarded), cors(request));
}

HttpResponse Router::health(const HttpRequest&) {
  const auto& all = pool_.all();
  const auto n_up = std::count_if(all.begin(), all.end(),
                                  [](const auto& backend) { return backend->can_be_chosen(); });
  const char* status = stopping_ ? "stopping" : n_up > 0 ? "ready" : "no backend is up";
  return json_response({{"status", status}, {"backends", all.size()}, {"backends_up", n_up}},
                       stopping_ || n_up == 0 ? 503 : 200);
}

HttpResponse Router::metrics(const HttpRequest&) {
  return {200, router_metrics(pool_, responses_), "text/plain; version=0.0.4; charset=utf-8"};
}

HttpResponse Router::models(const HttpRequest& request) {
  OrderedJson list = OrderedJson::array();
  const bool all = !request.path.starts_with(kModelPath);
  const std::string id = all ? "" : request.path.substr(kModelPath.size());
  for (const Backend::Model& model : models_of(pool_)) {
    if (all)
      list.push_back(model.json);
    else if (model.id == id || model.id == percent_decoded(id))
      return json_response(model.json);
  }
  if (!all)
    throw ApiError(404, fmt::format("the model {} does not exist", shown(id)), "model",
                   "model_not_found");
  return json_response({{"object", "list"}, {"data", std::move(list)}});
}

HttpResponse Router::backends(const HttpRequest&) {
  return json_response(backends_json(pool_, RouterClock::now()));
}

HttpResponse Router::drain(const HttpRequest& request) {
  const HttpAddress address = address_in(parameter(request.query, "backend"), "backend");
  const auto backend = pool_.find(address.authority);
  if (!backend)
    throw ApiError(404, fmt::format("{} is not a backend here", address.url()), "backend",
                   "backend_not_found");
  backend->draining = request.path == "/backends/drain";
  return json_response(backend_json(pool_, *backend, RouterClock::now()));
}

void Router::require_registration() const {
  if (!options_.accepts_registration)
    throw ApiError(403,
                   "backends cannot register here: start the router with --accept-registration", {},
                   "no_registration");
}

// The answers of the two functions below are those of lmdeploy's proxy.
HttpResponse Router::add_node(const HttpRequest& request) {
  require_registration();
  std::string url;
  try {
    const auto json = parse_ordered_json(request.body, "the request's body");
    const auto found = json.is_object() ? json.find("url") : json.end();
    if (found != json.end() && found->is_string()) url = *found;
  } catch (const Error& error) {
    throw ApiError(400, error.what());
  }
  const HttpAddress address = address_in(url, "url");
  const auto known = pool_.find(address.authority);
  if (known && !known->registered && known->address.tls != address.tls)
    throw ApiError(409,
                   fmt::format("{} is listed here as {}: change --backends or --backends-file",
                               address.url(), known->address.url()),
                   "url", "listed");
  pool_.add(address, true, RouterClock::now());
  return json_response("Added successfully");
}

HttpResponse Router::remove_node(const HttpRequest& request) {
  require_registration();
  const HttpAddress address = address_in(parameter(request.query, "node_url"), "node_url");
  const auto backend = pool_.find(address.authority);
  if (backend && !backend->registered)
    throw ApiError(409,
                   fmt::format("{} did not register: it is one of --backends or --backends-file",
                               address.url()),
                   "node_url", "listed");
  pool_.remove(address.authority);
  return json_response("Deleted successfully");
}

HttpResponse Router::nodes(const HttpRequest&) { return json_response(nodes_json(pool_)); }

asio::awaitable<void> Router::keep_house(asio::any_io_executor executor) {
  asio::steady_timer pause(executor);
  while (true) {
    boost::system::error_code ignored;
    pause.expires_after(kFilePeriod);
    co_await pause.async_wait(into(ignored));
    pool_.forget_lost(RouterClock::now(), kForgetAfter);
    if (!options_.backends_file.empty()) read_backends_file();
  }
}

// A file that cannot be read, such as one that is being written, changes nothing.
void Router::read_backends_file() {
  try {
    const std::string text = read_text_file(options_.backends_file, kMaxFileBytes);
    if (text == file_text_ && !file_is_bad_) return;
    const auto addresses = parse_backends_file(text, options_.backends_file);
    file_text_ = text;
    file_is_bad_ = false;
    pool_.set_listed(addresses, RouterClock::now());
    options_.log(fmt::format("{}: {} backends", options_.backends_file, addresses.size()));
  } catch (const Error& error) {
    if (!std::exchange(file_is_bad_, true))
      options_.log(fmt::format("warning: the list of backends stays as it was: {}", error.what()));
  }
}

HttpResponse Router::error_response(const ApiError& error) {
  return {.status = error.status,
          .body = dump_json(error_json(error)),
          .retry_after_seconds = error.status == 503 ? 5 : 0};
}

std::string Router::cors(const HttpRequest& request) const {
  return cors_headers(options_.cors_origins, request.cors);
}

}  // namespace tandem
