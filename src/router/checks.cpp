#include "router/checks.h"

#include <fmt/format.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>

#include "core/check.h"
#include "io/json.h"

namespace tandem {
namespace {

namespace asio = boost::asio;

// While a backend is up, its models are asked for with every tenth check.
constexpr int kChecksPerModels = 10;

}  // namespace

void Checks::start(const asio::any_io_executor& executor, const BackendPool::Pointer& backend) {
  asio::co_spawn(
      executor, [this, executor, backend] { return check_again_and_again(executor, backend); },
      asio::detached);
}

Checks::Task<void> Checks::check_again_and_again(asio::any_io_executor executor,
                                                 BackendPool::Pointer backend) {
  const auto pause = std::make_shared<asio::steady_timer>(executor);
  backend->check_now = [pause] { pause->cancel(); };
  for (int n = 0; !backend->removed; ++n) {
    co_await check(executor, *backend, n % kChecksPerModels == 0 || !backend->health.is_up());
    if (backend->removed) break;
    boost::system::error_code woken;
    pause->expires_after(
        std::chrono::duration_cast<asio::steady_timer::duration>(options_.interval));
    co_await pause->async_wait(into(woken));
  }
  backend->check_now = [] {};
}

Checks::Task<void> Checks::check(const asio::any_io_executor& executor, Backend& backend,
                                 bool asks_for_models) {
  HttpQuestion question;
  question.target = "/health";
  std::erase_if(backend.idle, [](const auto& kept) { return !kept->can_be_reused(); });
  ServerAnswer reply = co_await ask(executor, trust_, backend.address, question, options_.most);
  std::string why = reply.error;
  if (reply.status != 0 && reply.status != 200)
    why = fmt::format("GET /health: status {}: {}", reply.status, shown(reply.body));
  if (reply.status == 200 && asks_for_models) {
    question.target = "/v1/models";
    if (!options_.api_key.empty()) question.authorization = "Bearer " + options_.api_key;
    reply = co_await ask(executor, trust_, backend.address, question, options_.most);
    why = reply.error;
    if (reply.status != 0 && reply.status != 200)
      why = fmt::format("GET /v1/models: status {}: {}", reply.status, shown(reply.body));
    try {
      if (reply.status == 200) backend.models = models_of(reply.body);
    } catch (const Error& error) {
      why = error.what();
    }
  }
  if (why.empty()) {
    backend.last_good = RouterClock::now();
    if (backend.health.on_good_check())
      options_.log(fmt::format("backend {} is up", backend.address.url()));
    co_return;
  }
  if (reply.timed_out ? backend.health.on_slow_check(why) : backend.health.on_failure(why))
    went_down(backend);
  if (reply.status == 0 && !backend.health.is_up()) close_silent(backend);
}

void Checks::on_failure(const BackendPool::Pointer& backend, const std::string& why) {
  if (backend->health.on_failure(why)) went_down(*backend);
  backend->check_now();
}

void Checks::went_down(Backend& backend) {
  pool_.on_down(backend);
  backend.idle.clear();
  options_.log(
      fmt::format("backend {} is down: {}", backend.address.url(), backend.health.why_down()));
}

// Requests of a backend that does not even answer checks fail, unless bytes arrive.
void Checks::close_silent(Backend& backend) const {
  const auto running = backend.running;
  for (HttpClient* const connection : running)
    if (connection->silent_for() > 2 * options_.most) connection->close();
}

std::vector<Backend::Model> models_of(const std::string& answer) {
  const nlohmann::ordered_json json = parse_ordered_json(answer, "GET /v1/models");
  const auto list = json.is_object() ? json.find("data") : json.end();
  require(list != json.end() && list->is_array(),
          "GET /v1/models: the answer has no list \"data\"");
  std::vector<Backend::Model> models;
  for (const auto& entry : *list) {
    const auto id = entry.is_object() ? entry.find("id") : entry.end();
    require(id != entry.end() && id->is_string(),
            "GET /v1/models: an entry of \"data\" has no text \"id\"");
    Backend::Model model = {.id = *id, .json = entry};
    const auto role = entry.find("role");
    if (role != entry.end() && role->is_string()) model.role = *role;
    model.json.erase("role");
    models.push_back(std::move(model));
  }
  return models;
}

}  // namespace tandem
