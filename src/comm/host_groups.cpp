#include "comm/host_groups.h"

#include <algorithm>

#include "core/check.h"

namespace tandem {

HostLayout::HostLayout(const std::vector<int>& hosts) : n_sources_(hosts.size(), 0) {
  for (size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto first = std::find(hosts.begin(), hosts.end(), hosts[rank]) - hosts.begin();
    const int host = first < std::ssize(host_of_rank_) ? host_of_rank_[first] : n_hosts();
    if (host == n_hosts()) ranks_.emplace_back();
    host_of_rank_.push_back(host);
    number_in_host_.push_back(static_cast<int>(ranks_[host].size()));
    ranks_[host].push_back(static_cast<int>(rank));
  }
  n_planes_ = n_ranks();
  for (const std::vector<int>& ranks : ranks_)
    n_planes_ = std::min(n_planes_, static_cast<int>(ranks.size()));
  for (int rank = 0; rank < n_ranks(); ++rank)
    for (int host = 0; host < n_hosts(); ++host)
      if (host != host_of_rank_[rank]) ++n_sources_[gateway(rank, host)];
}

// A host with several ranks in the plane divides the work of receiving among them.
int HostLayout::gateway(int rank, int host) const {
  const int plane = plane_of(rank), n = static_cast<int>(ranks_[host].size());
  const int n_in_plane = (n - plane + n_planes_ - 1) / n_planes_;
  return ranks_[host][plane + number_in_host_[rank] / n_planes_ % n_in_plane * n_planes_];
}

bool HostLayout::has_equal_hosts() const {
  return has_two_levels() && std::ranges::all_of(ranks_, [&](const std::vector<int>& of_host) {
           return of_host.size() == ranks_[0].size();
         });
}

int HostLayout::most_sources_on(int host) const {
  int most = 0;
  for (const int rank : ranks_[host]) most = std::max(most, n_sources_[rank]);
  return most;
}

HostGroups::HostGroups(Group& all, HostLayout layout) : all_(all), layout_(std::move(layout)) {
  check(layout_.n_ranks() == all.size(), "a host for each rank");
  if (!layout_.has_two_levels()) return;
  within_ = all.split(layout_.host_of(all.rank()));
  plane_ = all.split(layout_.plane_of(all.rank()));
}

int HostGroups::rank_in_plane(int rank) const {
  int n_before = 0;
  for (int r = 0; r < rank; ++r) n_before += layout_.plane_of(r) == layout_.plane_of(rank);
  return n_before;
}

void HostGroups::set_patience(Patience patience) {
  for (Group* const part : {within_.get(), plane_.get()})
    if (part) part->set_patience(patience);
}

}  // namespace tandem
