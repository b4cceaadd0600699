// The ranks of a group by their hosts, and the groups through which a row crosses once to each
// host: a rank sends it to the rank with its own number on the other host, which sends it on.
#pragma once
#include <memory>
#include <vector>

#include "comm/group.h"

namespace tandem {

// A function of the hosts alone, so all ranks have the same.
class HostLayout {
 public:
  // hosts: [ranks] a number for each rank, the same for those of one host. The object numbers hosts
  // from 0, in the order of their first ranks.
  explicit HostLayout(const std::vector<int>& hosts);
  static HostLayout one_host(int n_ranks) { return HostLayout(std::vector<int>(n_ranks, 0)); }

  int n_ranks() const { return static_cast<int>(host_of_rank_.size()); }
  int n_hosts() const { return static_cast<int>(ranks_.size()); }
  int host_of(int rank) const { return host_of_rank_[rank]; }
  const std::vector<int>& host_of_rank() const { return host_of_rank_; }     // [ranks]
  const std::vector<int>& ranks_of(int host) const { return ranks_[host]; }  // ascending
  // The number of a rank among those of its host.
  int number_in_host(int rank) const { return number_in_host_[rank]; }

  // Several hosts, of which one has several ranks: rows need not cross once for each rank.
  bool has_two_levels() const { return n_hosts() > 1 && n_hosts() < n_ranks(); }
  bool has_equal_hosts() const;  // has_two_levels(), and all hosts have as many ranks
  // The ranks of a plane send each other what crosses. A plane has a rank of every host; where all
  // hosts have as many ranks, those with one number in their hosts.
  int plane_of(int rank) const { return number_in_host_[rank] % n_planes_; }
  // The rank of the same plane on `host` through which `rank` reaches that host.
  int gateway(int rank, int host) const;
  // Ranks of other hosts for which `rank` is the gateway.
  int n_sources(int rank) const { return n_sources_[rank]; }
  int most_sources_on(int host) const;  // of a rank of the host

 private:
  std::vector<int> host_of_rank_, number_in_host_, n_sources_;  // [ranks]
  std::vector<std::vector<int>> ranks_;                         // [hosts]
  int n_planes_;                                                // ranks of the host with the fewest
};

class HostGroups {
 public:
  // All ranks of `all`, which outlives the object, call it. Makes no group where there are not two
  // levels.
  HostGroups(Group& all, HostLayout layout);
  Group& all() const { return all_; }
  const HostLayout& layout() const { return layout_; }
  // Where there are two levels: the ranks of this rank's host and of its plane, both in ascending
  // order.
  Group& within() const { return *within_; }
  Group& plane() const { return *plane_; }
  int rank_in_plane(int rank) const;  // of a rank of all(), in the group of its plane

  // Sets the patience of within() and plane().
  void set_patience(Patience patience);

 private:
  Group& all_;
  const HostLayout layout_;
  std::unique_ptr<Group> within_, plane_;
};

}  // namespace tandem
