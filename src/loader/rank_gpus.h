// The GPUs of ranks among those of their hosts.
#pragma once
#include <string>
#include <vector>

#include "loader/model_options.h"

namespace tandem {

struct GpusOfRanks {
  std::vector<bool> have;  // [ranks] whether each computes on a GPU, which no other rank has
  std::string why_not;     // why some do not that may, in one line; empty: all that may do
};

// Chooses a GPU for this rank unless it is to compute on the CPU. All ranks call it, before any of
// them uses a GPU. Throws AgreedError where a rank that needs one (kCuda) has none of its own.
GpusOfRanks choose_gpus_of_ranks(const Ranks& ranks, DeviceChoice device);

}  // namespace tandem
