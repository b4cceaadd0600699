// A backend as the router sees it: whether it answers, how fast, and what it has to do. No socket,
// no clock: times are arguments.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "http/http_address.h"
#include "server/metrics.h"

namespace tandem {

class HttpClient;

using RouterClock = std::chrono::steady_clock;

// Whether a backend answers, from checks and from requests.
class Health {
 public:
  // A backend that was up needs so many good checks in a row to be up again, and so many checks
  // beyond their time limit in a row to be down.
  static constexpr int kGoodChecks = 2, kSlowChecks = 2;

  bool is_up() const { return up_; }
  bool has_been_up() const { return n_ups_ > 0; }
  int64_t n_ups() const { return n_ups_; }  // how often it has come up
  const std::string& why_down() const { return why_down_; }
  // A check succeeded. Returns whether the backend is up since now.
  bool on_good_check();
  // A check was not answered in time. Returns whether the backend is down since now.
  bool on_slow_check(const std::string& why);
  // A check or a request failed at once. Returns whether the backend is down since now.
  bool on_failure(const std::string& why);

 private:
  bool up_ = false;
  int64_t n_ups_ = 0;
  int n_good_ = 0, n_slow_ = 0;
  std::string why_down_ = "not checked yet";
};

// A mean in which a sample counts 0.8 times as much as the next one.
class Average {
 public:
  void add(double sample) { value_ = value_ ? *value_ + 0.2 * (sample - *value_) : sample; }
  const std::optional<double>& value() const { return value_; }

 private:
  std::optional<double> value_;
};

// How long answers take, without waiting for others.
class Speed {
 public:
  // A stream: seconds to its first event, and from each event to the next if it had several.
  void add_stream(double first_seconds, std::optional<double> token_seconds,
                  RouterClock::time_point now);
  // A whole answer of so many tokens.
  void add_whole(double seconds, int64_t n_tokens, RouterClock::time_point now);

  // Expected seconds of an answer of so many tokens while nothing else runs: time to first token
  // plus the time for all tokens. An old measurement halves with every kHalfLife, so a backend that
  // was slow once is tried again. Empty: nothing has been measured.
  std::optional<double> expected_seconds(double n_tokens, RouterClock::time_point now) const;
  static constexpr std::chrono::seconds kHalfLife{60};

  const std::optional<double>& first_seconds() const { return first_.value(); }
  const std::optional<double>& token_seconds() const { return token_.value(); }

 private:
  Average first_, token_;
  RouterClock::time_point measured_;
};

struct Backend {
  Backend(int number, HttpAddress where, bool by_itself);

  struct Model {
    std::string id;
    nlohmann::ordered_json json;  // its entry in the backend's /v1/models, without the role
    std::string role = {};        // prefill or decode; empty: a whole server
  };
  bool has_model(const std::string& model) const;  // empty: any
  std::string role() const;                        // as Model::role, of any model that has one
  // It computes prompts for decode servers, and gets requests only where nothing else answers.
  bool is_prefill_server() const { return role() == "prefill"; }
  bool can_be_chosen() const { return health.is_up() && !draining && !removed; }

  const int id;
  const HttpAddress address;
  const bool registered;  // by POST /nodes/add
  Health health;
  Speed speed;
  std::vector<Model> models;  // at the last good check
  bool draining = false;      // gets no new requests
  bool removed = false;       // no longer one of the router's; running requests end
  int64_t n_running = 0, n_requests = 0, n_failures = 0, n_retries = 0;
  int64_t last_chosen = 0;  // number of the choice, of all backends
  RouterClock::time_point last_good = {};
  Histogram first_byte_seconds, total_seconds;
  std::function<void()> check_now = [] {};
  std::vector<std::shared_ptr<HttpClient>> idle;  // connections for the next requests
  std::set<HttpClient*> running;                  // connections of running requests
};

}  // namespace tandem
