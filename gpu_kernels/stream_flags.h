// Flags that a stream raises and awaits without a kernel, by the driver's stream memory operations;
// `tandem bench hybrid` compares them with the kernels of signals.h. A flag is a word of mapped
// memory, 0 or 1. A recorded graph contains fixed values, so the taker resets the flag, and it must
// not be raised again before that.
#pragma once
#include <string>

#include "gpu_kernels/runtime.h"

namespace tandem::gpu {

// Empty if the driver supports them.
std::string why_no_stream_flags();

// Both throw RunError where the driver refuses, as it may during recording.
// Enqueues: sets the word to 1; the host then sees all earlier writes of the stream.
void raise_flag(const Stream& stream, uint32_t* word);
// Enqueues: waits until the word is 1, then sets it to 0.
void take_flag(const Stream& stream, uint32_t* word);

}  // namespace tandem::gpu
