// Simulates a GPU that is lost while running, for tests: the n-th work item of the streams fails,
// with n from TANDEM_GPU_LOST_AFTER at open_gpu(). No later work runs until the next open_gpu().
#pragma once
#include "core/invariant.h"

namespace tandem::gpu::emulated {

void plan_loss();
// Counts a work item; true if this one or an earlier one fails.
bool loss_strikes();
bool is_lost();
// Throws RunError, like every CUDA call after the GPU is lost.
void throw_if_lost(Caller at = Caller::here());

}  // namespace tandem::gpu::emulated
