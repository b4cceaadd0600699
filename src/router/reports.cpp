#include "router/reports.h"

#include <fmt/format.h>

#include <algorithm>

#include "io/json.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

const char* state_of(const Backend& backend) {
  return backend.health.is_up() ? "up" : backend.health.has_been_up() ? "down" : "starting";
}

template <class Value>
void each(std::string& text, const BackendPool& pool, const char* name, const char* kind,
          const char* help, Value value) {
  text +=
      fmt::format("# HELP tandem:router_{0} {1}\n# TYPE tandem:router_{0} {2}\n", name, help, kind);
  for (const auto& backend : pool.all())
    text += fmt::format("tandem:router_{}{{backend=\"{}\"}} {}\n", name, backend->address.url(),
                        value(*backend));
}

}  // namespace

Json backend_json(const BackendPool& pool, const Backend& b, RouterClock::time_point now) {
  Json models = Json::array();
  for (const Backend::Model& model : b.models) models.push_back(model.id);
  const std::string role = b.role();
  const std::optional<double> token = b.speed.token_seconds();
  return {{"url", b.address.url()},
          {"state", state_of(b)},
          {"draining", b.draining},
          {"registered", b.registered},
          {"error", b.health.is_up() ? Json() : Json(b.health.why_down())},
          {"models", std::move(models)},
          {"role", role.empty() ? Json() : Json(role)},
          {"running", b.n_running},
          {"requests", b.n_requests},
          {"failures", b.n_failures},
          {"retries", b.n_retries},
          {"time_to_first_token_seconds", or_null(b.speed.first_seconds())},
          {"tokens_per_second", token && *token > 0 ? Json(1 / *token) : Json()},
          {"expected_seconds", or_null(b.speed.expected_seconds(pool.answer_tokens(), now))}};
}

Json backends_json(const BackendPool& pool, RouterClock::time_point now) {
  Json list = Json::array();
  for (const auto& backend : pool.all()) list.push_back(backend_json(pool, *backend, now));
  return {{"backends", std::move(list)},
          {"answer_tokens", pool.answer_tokens()},
          {"prompt_bytes_per_second", 1 / pool.seconds_per_byte()},
          {"prefix_blocks", pool.prefix_blocks()}};
}

Json nodes_json(const BackendPool& pool) {
  Json nodes = Json::object();
  for (const auto& backend : pool.all()) {
    Json models = Json::array();
    for (const Backend::Model& model : backend->models) models.push_back(model.id);
    nodes[backend->address.url()] = {{"models", std::move(models)},
                                     {"unfinished", backend->n_running},
                                     {"latency", Json::array()},
                                     {"speed", nullptr}};
  }
  return nodes;
}

std::vector<Backend::Model> models_of(const BackendPool& pool) {
  std::vector<Backend::Model> models;
  for (const auto& backend : pool.all()) {
    if (!backend->health.is_up()) continue;
    for (const Backend::Model& model : backend->models)
      if (std::none_of(models.begin(), models.end(),
                       [&](const auto& other) { return other.id == model.id; }))
        models.push_back(model);
  }
  return models;
}

std::string router_metrics(const BackendPool& pool, const std::map<int, int64_t>& responses) {
  using B = const Backend&;
  std::string text;
  each(text, pool, "backend_up", "gauge", "1 if the backend answers checks.",
       [](B b) { return b.health.is_up() ? 1 : 0; });
  each(text, pool, "backend_draining", "gauge", "1 if the backend gets no new requests.",
       [](B b) { return b.draining ? 1 : 0; });
  each(text, pool, "backend_requests_running", "gauge", "Requests that wait for the backend.",
       [](B b) { return b.n_running; });
  each(text, pool, "backend_requests_total", "counter", "Requests that were sent to the backend.",
       [](B b) { return b.n_requests; });
  each(text, pool, "backend_failures_total", "counter",
       "Requests that failed because of the backend.", [](B b) { return b.n_failures; });
  each(text, pool, "backend_retries_total", "counter",
       "Requests that another backend got because this one failed or refused.",
       [](B b) { return b.n_retries; });
  const auto histogram = [&](const char* name, const char* help, const Histogram Backend::*member) {
    text += fmt::format("# HELP tandem:router_{0} {1}\n# TYPE tandem:router_{0} histogram\n", name,
                        help);
    for (const auto& backend : pool.all())
      text += ((*backend).*member)
                  .text(fmt::format("tandem:router_{}", name),
                        fmt::format("backend=\"{}\"", backend->address.url()));
  };
  histogram("backend_first_byte_seconds", "From request to the first byte of the answer's body.",
            &Backend::first_byte_seconds);
  histogram("backend_total_seconds", "From request to the end of the answer.",
            &Backend::total_seconds);
  text +=
      "# HELP tandem:router_http_responses_total Answers by HTTP status.\n"
      "# TYPE tandem:router_http_responses_total counter\n";
  for (const auto& [status, n] : responses)
    text += fmt::format("tandem:router_http_responses_total{{status=\"{}\"}} {}\n", status, n);
  return text;
}

}  // namespace tandem
