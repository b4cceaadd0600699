// Flags that a stream raises and awaits by itself, without a kernel: the driver's stream memory
// operations, which `tandem bench hybrid` holds the kernels of signals.h against. A flag is a word
// of mapped memory, 0 or 1. A recorded graph has fixed values in it, so that whoever takes a flag
// puts it back, and it must not be raised again before.
#pragma once
#include <string>

#include "gpu_kernels/runtime.h"

namespace tandem::gpu {

// Empty where the driver has them.
std::string why_no_stream_flags();

// Both throw RunError where the driver refuses, as it may while recording.
// Enqueues: the word becomes 1; the host then sees what the stream's work before has written.
void raise_flag(const Stream& stream, uint32_t* word);
// Enqueues: what follows begins once the word is 1, which becomes 0.
void take_flag(const Stream& stream, uint32_t* word);

}  // namespace tandem::gpu
