#include "offload/ranks/rank_timelines.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "comm/hosts.h"

namespace tandem {
namespace {

std::string name_of_system() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  return name.data();
}

// The texts of all ranks one after another with commas, on rank 0; nothing on the others.
std::string joined_on_first(Group& group, const std::string& mine) {
  const bool is_first = group.rank() == 0;
  std::vector<int64_t> out_sizes(group.size());
  group.all_gather_values(std::ssize(mine), std::span(out_sizes));
  const std::vector<int64_t> of_rank = out_sizes;
  if (!is_first) std::fill(out_sizes.begin(), out_sizes.end(), 0);
  std::vector<int64_t> in_sizes(group.size());
  in_sizes[0] = std::ssize(mine);
  std::string all(std::accumulate(out_sizes.begin(), out_sizes.end(), int64_t{0}), ' ');
  group.all_to_all({std::as_bytes(std::span(mine)), in_sizes},
                   {std::as_writable_bytes(std::span(all)), out_sizes});
  std::string joined;
  int64_t first = 0;
  for (int rank = 0; is_first && rank < group.size(); first += of_rank[rank++])
    joined += (rank > 0 ? "," : "") + all.substr(first, of_rank[rank]);
  return joined;
}

}  // namespace

std::string rank_timelines_json(Group& group, const Timeline* mine,
                                const std::vector<PlannedLayer>& planned, const RankPlace& place) {
  const int rank = group.rank();
  const std::vector<int> hosts =
      place.host_of_rank.empty() ? hosts_of_ranks(group) : place.host_of_rank;
  const ClockDifference clock = clock_differences(group, hosts, place.now)[rank];
  const Timeline nothing;
  const Timeline& timeline = mine ? *mine : nothing;
  const double first = timeline.first_begin() + clock.seconds;
  std::vector<double> first_of_rank(group.size());
  group.all_gather_values(first, std::span(first_of_rank));
  const double start = *std::min_element(first_of_rank.begin(), first_of_rank.end());

  std::string name = fmt::format("rank {} on host {}", rank,
                                 place.host_name.empty() ? name_of_system() : place.host_name);
  if (hosts[rank] != 0) name += fmt::format(", clock within {:.0f} us", clock.within * 1e6);
  const std::string events =
      joined_on_first(group, trace_events(timeline, {rank, name, start - clock.seconds}));
  return rank == 0 ? timeline_json(timeline, planned, events) : "";
}

}  // namespace tandem
