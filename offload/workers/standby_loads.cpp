#include "offload/workers/standby_loads.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "offload/workers/shards.h"

namespace tandem {
namespace {

bool have_one_in_common(const ExpertsOfLayers& a, const ExpertsOfLayers& b) {
  for (size_t l = 0; l < a.size(); ++l)
    for (size_t e = 0; e < a[l].size(); ++e)
      if (a[l][e] && b[l][e]) return true;
  return false;
}

}  // namespace

void StandbyLoads::ask(int peer, ExpertsOfLayers experts) {
  require_protocol(loader_ != nullptr, "this worker loads no experts");
  require_protocol(!answer(peer), "experts are asked for while others are loaded");
  asked_.push_back({peer, std::move(experts), {}});
}

void StandbyLoads::left(int peer) {
  std::erase_if(asked_, [&](const Asked& asked) { return asked.peer == peer; });
}

void StandbyLoads::begin_next() {
  if (!loading_.empty()) return;
  const auto first = std::find_if(asked_.begin(), asked_.end(), [&](const Asked& asked) {
    return asked.refusal.empty() && has_any(missing(asked));
  });
  if (first == asked_.end()) return;
  loading_ = missing(*first);
  loader_->begin(loading_);
}

bool StandbyLoads::has_ended() const {
  return !loading_.empty() && loader_->progress().state == ExpertLoader::State::kEnded;
}

// Who wanted some of what was not loaded is refused.
std::string StandbyLoads::finish() {
  check(has_ended(), "a load that has ended");
  const ExpertsOfLayers ended = std::exchange(loading_, {});
  const std::string text = text_of_layers(ended);
  try {
    loader_->finish();
  } catch (const Error& error) {
    for (Asked& asked : asked_)
      if (have_one_in_common(asked.experts, ended)) asked.refusal = error.what();
    return fmt::format("experts {} are not loaded: {}", text, error.what());
  }
  for (size_t l = 0; l < ended.size(); ++l)
    for (size_t e = 0; e < ended[l].size(); ++e)
      if (ended[l][e]) experts_[l][e] = true;
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
  } else if (!loading_.empty()) {
    const ExpertLoader::Progress progress = loader_->progress();
    answer.bytes_done = progress.bytes_done;
    answer.bytes_total = progress.bytes_total;
  }
  return answer;
}

ExpertsOfLayers StandbyLoads::missing(const Asked& asked) const {
  ExpertsOfLayers missing = asked.experts;
  for (size_t l = 0; l < missing.size(); ++l)
    for (size_t e = 0; e < missing[l].size(); ++e)
      if (experts_[l][e]) missing[l][e] = false;
  return missing;
}

}  // namespace tandem
