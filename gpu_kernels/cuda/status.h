// Turns a CUDA error into a RunError.
#pragma once
#include <cuda_runtime_api.h>

#include "core/run_error.h"
#include "gpu_kernels/gpu_facts.h"

namespace tandem::gpu {

// Throws RunError. Any later call may report errors of kernels that ran before.
inline void check_cuda(cudaError_t status, Caller at = Caller::here()) {
  if (status != cudaSuccess)
    throw RunError(failure_text(cudaGetErrorString(status), cudaGetErrorName(status), at));
}

}  // namespace tandem::gpu
