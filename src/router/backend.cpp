#include "router/backend.h"

#include <algorithm>
#include <cmath>

namespace tandem {
namespace {

constexpr double kFirstByteSeconds[] = {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75,
                                        1,    2.5,  5,   7.5, 10,  20,  40,  80, 160, 640};
constexpr double kTotalSeconds[] = {.01, .05, .1, .3, .5, .8, 1,   1.5, 2,   2.5, 5,
                                    10,  15,  20, 30, 40, 60, 120, 240, 480, 960};

}  // namespace

bool Health::on_good_check() {
  n_slow_ = 0;
  ++n_good_;
  if (up_ || (has_been_up() && n_good_ < kGoodChecks)) return false;
  up_ = true;
  ++n_ups_;
  why_down_.clear();
  return true;
}

bool Health::on_slow_check(const std::string& why) {
  n_good_ = 0;
  return ++n_slow_ >= kSlowChecks || !up_ ? on_failure(why) : false;
}

bool Health::on_failure(const std::string& why) {
  n_good_ = 0;
  why_down_ = why;
  return std::exchange(up_, false);
}

void Speed::add_stream(double first_seconds, std::optional<double> token_seconds,
                       RouterClock::time_point now) {
  first_.add(first_seconds);
  if (token_seconds) token_.add(*token_seconds);
  measured_ = now;
}

void Speed::add_whole(double seconds, int64_t n_tokens, RouterClock::time_point now) {
  if (n_tokens <= 0) return;
  token_.add(seconds / static_cast<double>(n_tokens));
  measured_ = now;
}

std::optional<double> Speed::expected_seconds(double n_tokens, RouterClock::time_point now) const {
  if (!first_.value() && !token_.value()) return {};
  const double measured = first_.value().value_or(0) + n_tokens * token_.value().value_or(0);
  const std::chrono::duration<double> age = now - measured_;
  return measured * std::exp2(-age / std::chrono::duration<double>(kHalfLife));
}

Backend::Backend(int number, HttpAddress where, bool by_itself)
    : id(number),
      address(std::move(where)),
      registered(by_itself),
      first_byte_seconds(kFirstByteSeconds),
      total_seconds(kTotalSeconds) {}

bool Backend::has_model(const std::string& model) const {
  return model.empty() ||
         std::any_of(models.begin(), models.end(), [&](const Model& m) { return m.id == model; });
}

std::string Backend::role() const {
  const auto with_role =
      std::find_if(models.begin(), models.end(), [](const Model& m) { return !m.role.empty(); });
  return with_role == models.end() ? "" : with_role->role;
}

}  // namespace tandem
