#include "offload/workers/worker_group.h"

#include <algorithm>

#include "core/check.h"

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
  for (const Shard& shard : p_.needs.shards) {
    if (shard.owners.empty() || !owns(link.welcome(), shard)) continue;
    const bool has_other = std::any_of(all.begin(), all.end(), [&](const WorkerLink* other) {
      return other != &link && other->is_known() && other->is_up() && owns(other->welcome(), shard);
    });
    if (!has_other) experts.insert(experts.end(), shard.experts.begin(), shard.experts.end());
  }
  std::sort(experts.begin(), experts.end());
  return experts;
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
  if (size() == n_before) return false;
  set_owners();
  return true;
}

void WorkerGroup::set_owners() {
  for (Shard& shard : shards_) {
    if (shard.owners.empty()) continue;  // the backbone has its experts
    shard.owners.clear();
    for (int w = 0; w < size(); ++w)
      if (owns(links_[w]->welcome(), shard)) shard.owners.push_back(w);
    check(!shard.owners.empty(), "an owner of every shard");
  }
}

}  // namespace tandem
