#include "offload/workers/worker_group.h"

#include <algorithm>

#include "core/check.h"
#include "offload/workers/standby_choice.h"

namespace tandem {
namespace {

bool is_in(const std::vector<std::string>& listed, const std::string& address) {
  return std::find(listed.begin(), listed.end(), address) != listed.end();
}

using Links = std::vector<std::unique_ptr<WorkerLink>>;

// Moves the links that are to go to the end of `to`.
template <class IsToGo>
void move_links(Links& from, Links& to, IsToGo is_to_go) {
  const auto first = std::stable_partition(from.begin(), from.end(),
                                           [&](const auto& link) { return !is_to_go(*link); });
  std::move(first, from.end(), std::back_inserter(to));
  from.erase(first, from.end());
}

}  // namespace

WorkerGroup::WorkerGroup(Parts parts, Links links, const std::vector<WorkerWelcome>& welcomes)
    : p_(std::move(parts)), shards_(p_.needs.shards), links_(std::move(links)) {
  for (size_t w = 0; w < links_.size(); ++w)
    links_[w]->keep(welcomes[w], p_.needs.max_rows, p_.changed);
}

void WorkerGroup::update(const std::vector<std::string>& listed) {
  Links ended;  // without the mutex
  const std::lock_guard lock(mutex_);
  ended.swap(forgotten_);
  move_links(newcomers_, ended, [&](const WorkerLink& link) {
    return !link.is_known() && !is_in(listed, link.address());
  });
  for (const std::string& address : listed) {
    kept_.erase(address);
    if (link_to(address)) continue;
    WorkerLinkOptions options = links_[0]->options();
    options.address = address;
    newcomers_.push_back(std::make_unique<WorkerLink>(p_.transport, options));
    const auto fits = [this](const WorkerWelcome& worker) { require_fits(worker, p_.needs); };
    newcomers_.back()->keep_newcomer(fits, p_.needs.max_rows, p_.changed);
  }
  for (WorkerLink* const link : present())
    if (link->is_known() && !is_in(listed, link->address())) leave_unless_needed(*link);
  ask_standbys();
}

// The links that are not left.
std::vector<WorkerLink*> WorkerGroup::present() const {
  std::vector<WorkerLink*> all;
  for (const Links* const links : {&links_, &newcomers_})
    for (const auto& link : *links)
      if (!link->leaves()) all.push_back(link.get());
  return all;
}

WorkerLink* WorkerGroup::link_to(const std::string& address) const {
  for (WorkerLink* const link : present())
    if (link->address() == address) return link;
  return nullptr;
}

void WorkerGroup::leave_unless_needed(WorkerLink& link) {
  const std::vector<int> needed = experts_of_no_other(link);
  if (needed.empty()) {
    kept_.erase(link.address());
    link.leave();
  } else if (kept_.insert(link.address()).second) {
    p_.warn(
        fmt::format("worker {} is not listed any more, but no other worker that is up has "
                    "experts {}: it is used until one is",
                    link.address(), text_of_experts(needed)));
  }
}

// Experts of the link's shards that no other worker has which is up.
std::vector<int> WorkerGroup::experts_of_no_other(const WorkerLink& link) const {
  const std::vector<WorkerLink*> all = present();
  std::vector<int> experts;
  for (size_t s = 0; s < p_.needs.shards.size(); ++s) {
    const Shard& shard = p_.needs.shards[s];
    if (!owns(link.welcome(), p_.needs, s)) continue;
    const bool has_other = std::any_of(all.begin(), all.end(), [&](const WorkerLink* other) {
      return other != &link && other->is_known() && other->is_up() &&
             owns(other->welcome(), p_.needs, s);
    });
    if (has_other) continue;
    const std::vector<int> of_shard = in_any_layer(shard);
    experts.insert(experts.end(), of_shard.begin(), of_shard.end());
  }
  std::sort(experts.begin(), experts.end());
  experts.erase(std::unique(experts.begin(), experts.end()), experts.end());
  return experts;
}

// One that is lost, and one that is needed although it is not listed, are replaced as soon as a
// standby has loaded their experts. A standby keeps them when they are back.
void WorkerGroup::ask_standbys() {
  const std::vector<WorkerLink*> all = present();
  std::vector<WorkerLink*> standbys;
  std::copy_if(all.begin(), all.end(), std::back_inserter(standbys),
               [](const WorkerLink* link) { return link->is_known() && link->is_standby(); });
  if (standbys.empty()) return;
  const std::vector<int> lost = lost_shards(all);
  if (lost.empty()) return;
  std::vector<StandbyState> states;
  for (const WorkerLink* const standby : standbys) {
    const WorkerLink::Load load = standby->load();
    StandbyState& state = states.emplace_back();
    state.takes_orders = standby->is_up() && !load.is_under_way;
    for (size_t s = 0; s < shards_.size(); ++s) {
      const Shard& shard = p_.needs.shards[s];
      state.loads.push_back(load.is_under_way && has_one_of(load.experts, shard));
      state.may_load.push_back(may_own(standby->welcome(), p_.needs, s) &&
                               !owns(standby->welcome(), p_.needs, s) &&
                               !has_one_of(load.refused, shard));
    }
  }
  for (const auto& [shard, standby] : standby_orders(lost, states)) {
    const Shard& of = p_.needs.shards[shard];
    p_.warn(fmt::format("experts {} have no worker that is up: the standby {} loads them",
                        text_of_shard(of), standbys[standby]->address()));
    standbys[standby]->ask_to_load(of);
  }
}

// Those without an owner that is listed, and is up or was until a moment ago.
std::vector<int> WorkerGroup::lost_shards(const std::vector<WorkerLink*>& all) const {
  std::vector<int> lost;
  for (size_t s = 0; s < p_.needs.shards.size(); ++s) {
    if (p_.needs.shards[s].owners.empty()) continue;
    const bool has_owner = std::any_of(all.begin(), all.end(), [&](const WorkerLink* link) {
      return link->is_known() && !kept_.contains(link->address()) &&
             (link->is_up() || Clock::now() - link->down_since() < p_.grace) &&
             owns(link->welcome(), p_.needs, s);
    });
    if (!has_owner) lost.push_back(static_cast<int>(s));
  }
  return lost;
}

Clock::time_point WorkerGroup::got_on(const Shard& shard) const {
  const std::lock_guard lock(mutex_);
  Clock::time_point latest{};
  for (const WorkerLink* const link : present()) {
    const WorkerLink::Load load = link->load();
    if (has_one_of(load.experts, shard)) latest = std::max(latest, load.got_on);
  }
  return latest;
}

std::string WorkerGroup::text_of_standbys(const Shard& shard) const {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (const WorkerLink* const link : present()) {
    const WorkerLink::Load load = link->load();
    if (!has_one_of(load.experts, shard) || has_one_of(link->welcome().experts, shard)) continue;
    text += fmt::format(", standby {} ({})", link->address(),
                        !load.why.empty() ? load.why
                        : link->is_up()   ? "it loads them"
                                          : link->why_down());
  }
  return text;
}

bool WorkerGroup::is_up(const std::string& address) const {
  const std::lock_guard lock(mutex_);
  const WorkerLink* const link = link_to(address);
  return link && link->is_up();
}

std::vector<WorkerStatus> WorkerGroup::status() const {
  const std::lock_guard lock(mutex_);
  std::vector<WorkerStatus> all;
  for (const WorkerLink* const link : present()) all.push_back(link->status());
  return all;
}

bool WorkerGroup::take_in() {
  const std::lock_guard lock(mutex_);
  ask_standbys();
  return take_in_newcomers();
}

// With one lock: update() leaves a worker because of another one that is perhaps not taken in yet.
void WorkerGroup::begin_step() {
  const std::lock_guard lock(mutex_);
  take_in_newcomers();
  const int n_before = size();
  move_links(links_, forgotten_, [](const WorkerLink& link) { return link.leaves(); });
  if (size() != n_before) set_owners();
}

bool WorkerGroup::take_in_newcomers() {
  const int n_before = size();
  move_links(newcomers_, links_, [](const WorkerLink& link) { return link.is_known(); });
  bool any = size() != n_before;
  for (const auto& link : links_) any |= link->take_growth();
  if (any) set_owners();
  return any;
}

void WorkerGroup::set_owners() {
  for (size_t s = 0; s < shards_.size(); ++s) {
    Shard& shard = shards_[s];
    if (shard.owners.empty()) continue;  // the backbone has its experts
    shard.owners.clear();
    for (int w = 0; w < size(); ++w)
      if (owns(links_[w]->welcome(), p_.needs, s)) shard.owners.push_back(w);
    check(!shard.owners.empty(), "an owner of every shard");
  }
}

}  // namespace tandem
