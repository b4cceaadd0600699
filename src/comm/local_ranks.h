// Ranks as threads of this process, for tests: every mode of every layer can be tested without MPI.
#pragma once
#include <functional>
#include <optional>

#include "comm/group.h"

namespace tandem {

// A fault for tests: a rank is lost at the begin of one of its calls of a group.
struct RankLoss {
  int rank;
  int64_t call;  // from 0, over all groups of the rank
  bool stops;    // its thread stops until all others have ended; else it ends at once
};

struct LocalRanks {
  int n;
  Patience patience = {};
  std::optional<RankLoss> loss = {};
};

// Runs work(group) on n threads at the same time, each of them a rank of one group. Throws what the
// rank threw that failed first, once all threads have ended. A rank whose thread ends is lost for
// those that still wait for it.
void run_local_ranks(const LocalRanks& ranks, const std::function<void(Group&)>& work);

}  // namespace tandem
