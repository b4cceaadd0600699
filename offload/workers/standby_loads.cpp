#include "offload/workers/standby_loads.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "offload/workers/shards.h"

namespace tandem {
namespace {

bool any(const std::vector<bool>& experts) {
  return std::find(experts.begin(), experts.end(), true) != experts.end();
}

bool have_one_in_common(const std::vector<bool>& a, const std::vector<bool>& b) {
  for (size_t e = 0; e < a.size(); ++e)
    if (a[e] && b[e]) return true;
  return false;
}

}  // namespace

void StandbyLoads::ask(int peer, std::vector<bool> experts) {
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
    return asked.refusal.empty() && any(missing(asked));
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
  const std::vector<bool> ended = std::exchange(loading_, {});
  const std::string text = text_of_experts(listed(ended));
  try {
    loader_->finish();
  } catch (const Error& error) {
    for (Asked& asked : asked_)
      if (have_one_in_common(asked.experts, ended)) asked.refusal = error.what();
    return fmt::format("experts {} are not loaded: {}", text, error.what());
  }
  for (size_t e = 0; e < ended.size(); ++e)
    if (ended[e]) experts_[e] = true;
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
  } else if (!any(missing(*asked))) {
    answer.state = LoadAnswer::State::kLoaded;
  } else if (!loading_.empty()) {
    const ExpertLoader::Progress progress = loader_->progress();
    answer.bytes_done = progress.bytes_done;
    answer.bytes_total = progress.bytes_total;
  }
  return answer;
}

std::vector<bool> StandbyLoads::missing(const Asked& asked) const {
  std::vector<bool> missing = asked.experts;
  for (size_t e = 0; e < missing.size(); ++e)
    if (experts_[e]) missing[e] = false;
  return missing;
}

}  // namespace tandem
