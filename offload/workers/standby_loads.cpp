#include "offload/workers/standby_loads.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "offload/workers/shards.h"

namespace tandem {

void StandbyLoads::ask(int peer, ExpertsOfLayers experts) {
  require_protocol(loader_ != nullptr, "this worker loads no experts");
  require_protocol(!answer(peer), "experts are asked for while others are loaded");
  asked_.push_back({peer, std::move(experts), {}});
  may_drop_ = true;
}

void StandbyLoads::joined(int peer) { users_[peer] = {experts_}; }

void StandbyLoads::uses(int peer, ExpertsOfLayers experts) {
  require_protocol(moves_, "the experts of this worker do not move");
  User& user = users_.at(peer);
  require_protocol(!has_any(layers_without(experts, user.experts)),
                   "experts are to be used that were not asked for");
  if (user.has_said) add_layers(layers_without(user.experts, experts), given_away_);
  user = {std::move(experts), true};
  may_drop_ = true;
}

void StandbyLoads::left(int peer) {
  users_.erase(peer);
  may_drop_ = true;
  std::erase_if(asked_, [&](const Asked& asked) { return asked.peer == peer; });
}

void StandbyLoads::told(int peer) {
  const auto asked = std::find_if(asked_.begin(), asked_.end(),
                                  [&](const Asked& one) { return one.peer == peer; });
  if (asked == asked_.end()) return;
  if (asked->refusal.empty()) add_layers(asked->experts, users_[peer].experts);
  asked_.erase(asked);
  may_drop_ = true;
}

// What was asked first and is neither here nor refused; null: there is none.
const StandbyLoads::Asked* StandbyLoads::next() const {
  const auto first = std::find_if(asked_.begin(), asked_.end(), [&](const Asked& asked) {
    return asked.refusal.empty() && has_any(missing(asked));
  });
  return first == asked_.end() ? nullptr : &*first;
}

void StandbyLoads::begin_next() {
  if (!loading_.empty() || has_unused()) return;
  const Asked* const first = next();
  if (!first) return;
  loading_ = missing(*first);
  loader_->begin(loading_);
}

// What no backbone which is connected uses, or waits for.
ExpertsOfLayers StandbyLoads::unused() const {
  ExpertsOfLayers unused = experts_;
  for (const auto& [peer, user] : users_) unused = layers_without(unused, user.experts);
  for (const Asked& asked : asked_) unused = layers_without(unused, asked.experts);
  return unused;
}

// What was given away, and what makes room for the next load: experts of the same layers, because a
// backbone has as many of a layer here as before.
ExpertsOfLayers StandbyLoads::to_drop() const {
  const ExpertsOfLayers unused = this->unused();
  ExpertsOfLayers drop = common_layers(unused, given_away_);
  const Asked* const first = next();
  if (!first || has_any(drop)) return drop;
  const ExpertsOfLayers wanted = missing(*first);
  if (loader_->has_room(wanted)) return drop;
  for (size_t l = 0; l < wanted.size(); ++l) {
    auto n = std::count(wanted[l].begin(), wanted[l].end(), true);
    for (size_t e = 0; e < wanted[l].size() && n > 0; ++e)
      if (unused[l][e]) drop[l][e] = true, --n;
  }
  return drop;
}

bool StandbyLoads::has_unused() const {
  if (!moves_ || !may_drop_ || !loading_.empty()) return false;
  may_drop_ = has_any(to_drop());
  return may_drop_;
}

std::string StandbyLoads::drop_unused() {
  const ExpertsOfLayers drop = to_drop();
  loader_->drop(drop);
  experts_ = layers_without(experts_, drop);
  given_away_ = layers_without(given_away_, drop);
  return fmt::format("{} experts of all layers were given away", n_of_all_layers(drop));
}

bool StandbyLoads::has_ended() const {
  return !loading_.empty() && loader_->progress().state == ExpertLoader::State::kEnded;
}

// Who wanted some of what was not loaded is refused.
std::string StandbyLoads::finish() {
  check(has_ended(), "a load that has ended");
  may_drop_ = true;
  const ExpertsOfLayers ended = std::exchange(loading_, {});
  const std::string text = text_of_layers(ended);
  const int64_t n_bytes = loader_->progress().bytes_total;
  try {
    loader_->finish();
  } catch (const Error& error) {
    for (Asked& asked : asked_)
      if (has_any(common_layers(asked.experts, ended))) asked.refusal = error.what();
    return fmt::format("experts {} are not loaded: {}", text, error.what());
  }
  add_layers(ended, experts_);
  bool is_wanted = false;
  for (Asked& asked : asked_)
    if (has_any(common_layers(asked.experts, ended))) asked.n_bytes += n_bytes, is_wanted = true;
  if (moves_ && !is_wanted) add_layers(ended, given_away_);  // who asked for them was lost
  return fmt::format("experts {} are loaded", text);
}

// The progress is that of the load under way, also where it is for another backbone: a load that
// this one waits for gets on.
std::optional<LoadAnswer> StandbyLoads::answer(int peer) const {
  const auto asked = std::find_if(asked_.begin(), asked_.end(),
                                  [&](const Asked& one) { return one.peer == peer; });
  if (asked == asked_.end()) return {};
  LoadAnswer answer;
  if (!asked->refusal.empty()) {
    answer.state = LoadAnswer::State::kRefused;
    answer.why = asked->refusal;
  } else if (!has_any(missing(*asked))) {
    answer.state = LoadAnswer::State::kLoaded;
    answer.bytes_done = answer.bytes_total = asked->n_bytes;
  } else if (!loading_.empty()) {
    const ExpertLoader::Progress progress = loader_->progress();
    answer.bytes_done = progress.bytes_done;
    answer.bytes_total = progress.bytes_total;
  }
  return answer;
}

ExpertsOfLayers StandbyLoads::missing(const Asked& asked) const {
  return layers_without(asked.experts, experts_);
}

}  // namespace tandem
