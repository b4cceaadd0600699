// The GPU of a rank among those of its host.
#pragma once
#include <string>

#include "loader/model_options.h"

namespace tandem {

// Chooses a GPU that no other rank has. All ranks call it, before any of them uses a GPU. Returns
// why they do not have one each, in one line, the same on all ranks; empty: they have. Throws
// AgreedError instead where they need GPUs.
std::string choose_gpu_of_rank(const Ranks& ranks, bool needs_gpus);

}  // namespace tandem
