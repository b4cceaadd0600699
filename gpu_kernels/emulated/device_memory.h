// Memory of the emulated GPU. Device memory faults when it is accessed while no stream works, so
// the host must copy and wait. A guard page follows every allocation.
#pragma once
#include <cstdint>

#include "gpu_kernels/runtime.h"

namespace tandem::gpu::emulated {

// Filled with 0xff. Throws Error when memory is exhausted.
void* allocate(int64_t bytes, Site site);
void release(void* data, int64_t bytes);
// True if the whole range was allocated here and not released; false for ordinary host memory.
bool is_allocated(const void* data, int64_t bytes);

// Called in pairs by a stream that starts and stops working.
void open_device_memory();
void close_device_memory();

}  // namespace tandem::gpu::emulated
