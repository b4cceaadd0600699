// Turns a CUDA error into the project's.
#pragma once
#include <cuda_runtime_api.h>

#include "core/check.h"

namespace tandem::gpu {

// Throws Error. Errors of kernels that ran before come out at any later call.
inline void check_cuda(cudaError_t status, Caller at = Caller::here()) {
  require(
      status != cudaErrorNoKernelImageForDevice,
      "this program was built for other GPUs than this one: build it with -DTANDEM_CUDA=all, or "
      "use --device cpu");
  require(status == cudaSuccess, "the GPU failed: {} ({}, at {}:{})", cudaGetErrorString(status),
          cudaGetErrorName(status), at.file, at.line);
}

}  // namespace tandem::gpu
