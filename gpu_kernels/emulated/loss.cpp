#include "gpu_kernels/emulated/loss.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>

#include "core/run_error.h"
#include "gpu_kernels/gpu_facts.h"

namespace tandem::gpu::emulated {
namespace {

std::atomic<int64_t> pieces_left = INT64_MAX;

}  // namespace

void plan_loss() {
  const char* n = std::getenv("TANDEM_GPU_LOST_AFTER");
  pieces_left = n ? std::atoll(n) : INT64_MAX;
}

bool loss_strikes() { return is_lost() || --pieces_left <= 0; }

bool is_lost() { return pieces_left <= 0; }

void throw_if_lost(Caller at) {
  if (is_lost())
    throw RunError(failure_text("unspecified launch failure", "cudaErrorLaunchFailure", at));
}

}  // namespace tandem::gpu::emulated
