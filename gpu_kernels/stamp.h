// Timestamps in a stream's work, also within a recorded graph.
#pragma once
#include "gpu_kernels/launch_shape.h"

namespace tandem::gpu {

// Writes the GPU clock, in nanoseconds, to mapped memory.
void stamp(const Stream& stream, uint64_t* mapped);

}  // namespace tandem::gpu
