// Memory of the emulated GPU. Device memory faults when it is touched while no stream works: the
// host must copy, and wait. A page that faults follows every allocation.
#pragma once
#include <cstdint>

#include "gpu_kernels/runtime.h"

namespace tandem::gpu::emulated {

// Filled with 0xff. Throws Error when memory is too little.
void* allocate(int64_t bytes, Site site);
void release(void* data, int64_t bytes);
// Whether all of it was allocated here and not released: not memory of the host alone.
bool is_allocated(const void* data, int64_t bytes);

// Called in pairs by streams that begin and cease to work.
void open_device_memory();
void close_device_memory();

}  // namespace tandem::gpu::emulated
