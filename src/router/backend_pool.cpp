#include "router/backend_pool.h"

#include <algorithm>

#include "router/choice.h"

namespace tandem {

BackendPool::Pointer BackendPool::add(const HttpAddress& address, bool registered,
                                      RouterClock::time_point now) {
  if (Pointer known = find(address.authority)) {
    if (known->address.tls == address.tls) return known;
    remove(address.authority);  // the server there has changed
  }
  all_.push_back(std::make_shared<Backend>(next_id_++, address, registered));
  all_.back()->last_good = now;
  Pointer added = all_.back();
  on_added(added);
  return added;
}

bool BackendPool::remove(const std::string& authority) {
  const Pointer backend = find(authority);
  if (!backend) return false;
  backend->removed = true;
  backend->idle.clear();
  backend->check_now();
  prefixes_.forget(backend->id);
  all_.erase(std::find(all_.begin(), all_.end(), backend));
  return true;
}

void BackendPool::set_listed(const std::vector<HttpAddress>& addresses,
                             RouterClock::time_point now) {
  const std::vector<Pointer> before = all_;
  for (const Pointer& backend : before) {
    const bool listed = std::any_of(addresses.begin(), addresses.end(), [&](const auto& address) {
      return address.url() == backend->address.url();
    });
    if (!listed && !backend->registered) remove(backend->address.authority);
  }
  for (const HttpAddress& address : addresses) add(address, false, now);
}

void BackendPool::forget_lost(RouterClock::time_point now, std::chrono::seconds after) {
  const std::vector<Pointer> before = all_;
  for (const Pointer& backend : before)
    if (backend->registered && !backend->health.is_up() && now - backend->last_good > after)
      remove(backend->address.authority);
}

BackendPool::Pointer BackendPool::find(const std::string& authority) const {
  const auto found = std::find_if(all_.begin(), all_.end(), [&](const Pointer& backend) {
    return backend->address.authority == authority;
  });
  return found == all_.end() ? nullptr : *found;
}

bool BackendPool::can_get(const Backend& backend, const RequestSummary& request,
                          const std::vector<Pointer>& tried) {
  return backend.can_be_chosen() && backend.has_model(request.model) &&
         std::none_of(tried.begin(), tried.end(),
                      [&](const Pointer& other) { return other.get() == &backend; });
}

BackendPool::Choice BackendPool::choose(const RequestSummary& request,
                                        const std::vector<Pointer>& tried,
                                        RouterClock::time_point now) {
  std::vector<Candidate> candidates;
  std::vector<Pointer> backends;
  const auto known = prefixes_.find(request.prefixes);
  const bool has_other = std::any_of(all_.begin(), all_.end(), [&](const Pointer& backend) {
    return can_get(*backend, request, tried) && !backend->is_prefill_server();
  });
  for (const Pointer& backend : all_) {
    if (!can_get(*backend, request, tried) || (has_other && backend->is_prefill_server())) continue;
    const auto n_known = known.find(backend->id);
    backends.push_back(backend);
    candidates.push_back(
        {.answer_seconds = backend->speed.expected_seconds(answer_tokens(), now),
         .n_running = backend->n_running,
         .known_bytes =
             n_known == known.end() ? 0 : static_cast<int64_t>(n_known->second * kPrefixBlockBytes),
         .last_chosen = backend->last_chosen});
  }
  if (backends.empty()) return {};
  const size_t best = best_candidate(candidates, seconds_per_byte());
  backends[best]->last_chosen = ++n_choices_;
  prefixes_.add(request.prefixes, backends[best]->id);
  return {backends[best], candidates[best].known_bytes};
}

bool BackendPool::has_choice(const RequestSummary& request,
                             const std::vector<Pointer>& tried) const {
  return std::any_of(all_.begin(), all_.end(),
                     [&](const Pointer& backend) { return can_get(*backend, request, tried); });
}

bool BackendPool::may_have_model(const std::string& model) const {
  return all_.empty() || std::any_of(all_.begin(), all_.end(), [&](const Pointer& backend) {
           return backend->has_model(model) || !backend->health.has_been_up();
         });
}

void BackendPool::add_prompt(double seconds, int64_t prompt_bytes) {
  if (prompt_bytes >= kMinPromptBytes)
    seconds_per_byte_.add(seconds / static_cast<double>(prompt_bytes));
}

}  // namespace tandem
