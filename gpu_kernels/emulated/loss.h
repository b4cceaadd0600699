// A card that is lost in mid-run, for tests: the n-th piece of work of the streams fails, by
// TANDEM_GPU_LOST_AFTER=n as open_card() finds it, and nothing after it runs until the next
// open_card().
#pragma once
#include "core/invariant.h"

namespace tandem::gpu::emulated {

void plan_loss();
// Counts a piece of work; true: it fails, or one before it did.
bool loss_strikes();
bool is_lost();
// Throws RunError, as every call of CUDA does once the card is lost.
void throw_if_lost(Caller at = Caller::here());

}  // namespace tandem::gpu::emulated
