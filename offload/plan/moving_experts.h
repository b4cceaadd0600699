// Memory for experts that move while a server answers (serve --rebalance, --hot-experts live), in a
// placement. Pure.
#pragma once
#include <optional>
#include <string>

#include "offload/plan/placement.h"

namespace tandem {

// Why the experts of a placement cannot move: between ranks that each have whole ones, all on CPUs
// or all on GPUs, or between one GPU and the CPU beside it. Empty if they can.
std::optional<std::string> why_experts_stay(const Placement& placement);

// Experts of one device for which memory is kept, as the loader does: the most that a rank has of
// one layer, or those that a GPU and its CPU exchange at once. 0 if experts stay there.
int spare_experts(const Placement& placement, DeviceId device);

// The widest format among the experts of a device; empty without any.
std::optional<WeightFormat> format_of_experts(const ModelConfig& config, const Placement& placement,
                                              DeviceId device);

}  // namespace tandem
