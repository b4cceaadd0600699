#pragma once
#include <memory>

#include "comm/group.h"
#include "gpu_kernels/exchange/collectives.h"

namespace tandem {

// Connects the GPUs of the ranks of a group, each of which has one and calls it. Throws AgreedError
// where they cannot be connected.
std::unique_ptr<gpu::Collectives> connected(Group& ranks);

}  // namespace tandem
