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
    : p_(std::move(parts)), needs_(p_.needs), shards_(p_.needs.shards), links_(std::move(links)) {
  for (size_t w = 0; w < links_.size(); ++w)
    links_[w]->keep(welcomes[w], needs_.max_rows, p_.changed);
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
    const auto fits = [this](const WorkerWelcome& worker) { require_newcomer_fits(worker); };
    newcomers_.back()->keep_newcomer(fits, needs_.max_rows, p_.changed);
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
  for (size_t s = 0; s < needs_.shards.size(); ++s) {
    const Shard& shard = needs_.shards[s];
    if (!owns(link.welcome(), needs_, s)) continue;
    const bool has_other = std::any_of(all.begin(), all.end(), [&](const WorkerLink* other) {
      return other != &link && other->is_known() && other->is_up() &&
             owns(other->welcome(), needs_, s);
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
      const Shard& shard = needs_.shards[s];
      state.loads.push_back(load.is_under_way && has_one_of(load.experts, shard));
      state.may_load.push_back(may_own(standby->welcome(), needs_, s) &&
                               !owns(standby->welcome(), needs_, s) &&
                               !has_one_of(load.refused, shard));
    }
  }
  for (const auto& [shard, standby] : standby_orders(lost, states)) {
    const Shard& of = needs_.shards[shard];
    p_.warn(fmt::format("experts {} have no worker that is up: the standby {} loads them",
                        text_of_shard(of), standbys[standby]->address()));
    const WorkerWelcome& model = needs_.model;
    standbys[standby]->ask_to_load(
        experts_of_shard(of, model.n_layers, static_cast<int>(model.experts[0].size())));
  }
}

// Those without an owner that is listed, and is up or was until a moment ago.
std::vector<int> WorkerGroup::lost_shards(const std::vector<WorkerLink*>& all) const {
  std::vector<int> lost;
  for (size_t s = 0; s < needs_.shards.size(); ++s) {
    if (needs_.shards[s].owners.empty()) continue;
    const bool has_owner = std::any_of(all.begin(), all.end(), [&](const WorkerLink* link) {
      return link->is_known() && !kept_.contains(link->address()) &&
             (link->is_up() || Clock::now() - link->down_since() < p_.grace) &&
             owns(link->welcome(), needs_, s);
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
    if (!link->is_standby()) continue;
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
  ++n_changes_;
  for (size_t s = 0; s < shards_.size(); ++s) {
    Shard& shard = shards_[s];
    if (shard.owners.empty()) continue;  // the backbone has its experts
    shard.owners.clear();
    for (int w = 0; w < size(); ++w)
      if (owns(links_[w]->welcome(), needs_, s)) shard.owners.push_back(w);
    check(!shard.owners.empty(), "an owner of every shard");
  }
}

// On the thread of a link.
void WorkerGroup::require_newcomer_fits(const WorkerWelcome& worker) const {
  const std::lock_guard lock(mutex_);
  require_fits(worker, needs_);
}

WorkerHomes WorkerGroup::homes() const {
  const std::lock_guard lock(mutex_);
  std::vector<WorkerHomes::Worker> workers;
  for (const WorkerLink* const link : present())
    if (link->is_known())
      workers.push_back({link->address(), link->welcome(), link->moves_experts() && link->is_up()});
  return worker_homes(std::move(workers), needs_.model.n_layers);
}

void WorkerGroup::begin_move(const WorkerHomes& homes, std::span<const ExpertChange> changes) {
  move_ = worker_move(homes, changes);
  const std::lock_guard lock(mutex_);
  for (WorkerMove::Part& part : move_.parts) {
    WorkerLink* const link = link_to(part.address);
    if (!link || !link->is_up())
      part.why_not = "was lost";
    else if (has_any(part.arriving) && !link->ask_to_load(part.arriving))
      part.why_not = "still loads what it was asked for before";
  }
}

WorkerMoveState WorkerGroup::move_state() const {
  const std::lock_guard lock(mutex_);
  return state_of_move();
}

// With the mutex.
WorkerMoveState WorkerGroup::state_of_move() const {
  WorkerMoveState state;
  for (const WorkerMove::Part& part : move_.parts) {
    const WorkerLink* const link = link_to(part.address);
    const WorkerLink::Load load = link ? link->load() : WorkerLink::Load();
    const bool is_asked = part.why_not.empty() && has_any(part.arriving);
    const bool is_here = link && link->is_up();
    if (is_asked && is_here && load.is_under_way) {
      state.is_loading = true;
      continue;
    }
    const bool is_loaded = load.answer.state == LoadAnswer::State::kLoaded &&
                           !has_any(layers_without(part.arriving, load.experts));
    std::string why = part.why_not;
    if (why.empty() && !is_here) why = "was lost";
    if (why.empty() && is_asked && !is_loaded)
      why = load.why.empty() ? "was lost" : "cannot load its experts: " + load.why;
    if (!why.empty() && state.why.empty())
      state.why = fmt::format("worker {} {}", part.address, why);
    if (is_asked) state.n_bytes += load.answer.bytes_total;
  }
  return state;
}

std::string WorkerGroup::finish_move() {
  const std::lock_guard lock(mutex_);
  const WorkerMoveState state = state_of_move();
  if (!state.why.empty()) return state.why;
  check(!state.is_loading, "experts that are loaded");
  for (const WorkerMove::Part& part : move_.parts) {
    WorkerLink* const link = link_to(part.address);
    ExpertsOfLayers held = layers_without(link->welcome().experts, part.leaving);
    add_layers(part.arriving, held);
    link->hold(held);
  }
  move_ = {};
  divide_again();
  return {};
}

void WorkerGroup::give_up_move() {
  const std::lock_guard lock(mutex_);
  for (const WorkerMove::Part& part : move_.parts)
    if (WorkerLink* const link = link_to(part.address)) link->give_up_load();
}

std::vector<int64_t> WorkerGroup::version_of_homes() const {
  const std::lock_guard lock(mutex_);
  std::vector<int64_t> version = {n_changes_};
  for (const WorkerLink* const link : present()) version.push_back(link->is_up());
  return version;
}

// Shards by what the workers have now, also those that are down.
void WorkerGroup::divide_again() {
  std::vector<WorkerWelcome> welcomes;
  for (const WorkerLink* const link : present())
    if (link->is_known()) welcomes.push_back(link->welcome());
  const WorkerNeeds fresh = needs_of(welcomes, needs_.model.n_layers, needs_.max_rows);
  needs_.shards = fresh.shards;
  needs_.arithmetic = fresh.arithmetic;
  shards_ = needs_.shards;
  set_owners();
}

}  // namespace tandem
