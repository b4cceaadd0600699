// The timelines of all ranks in one text for a Chrome trace viewer, on one axis of time.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "comm/group.h"
#include "core/clock.h"
#include "offload/timeline.h"

namespace tandem {

// Where a rank runs.
struct RankPlace {
  std::string host_name;                                           // empty: the system's
  std::vector<int> host_of_rank = {};                              // empty: hosts_of_ranks()
  std::function<double()> now = [] { return seconds_since({}); };  // the clock of its timeline
};

// timeline_json() with a process for each rank, "rank 2 on host b". All ranks call it once they
// have computed everything; `mine` is null where nothing was recorded. Returns the text on rank 0
// and nothing on the others. The means, and what is planned, are of rank 0. Where a rank is on
// another host than rank 0 its process says within which time its clock is known.
std::string rank_timelines_json(Group& group, const Timeline* mine,
                                const std::vector<PlannedLayer>& planned = {},
                                const RankPlace& place = {});

}  // namespace tandem
