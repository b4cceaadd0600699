// Counters with which a stream and the CPU wait for each other without driver calls, also within a
// recorded graph. The n-th await ends with the n-th raise, in either order: counters are never
// reset, so no raise is lost. Writes before a raise, also to mapped memory, are visible after its
// await.
#pragma once
#include <string>

#include "gpu_kernels/runtime.h"

namespace tandem::gpu {

// Where a signal is stored, for kernels that raise or await it as a part of their work.
struct SignalWords {
  uint32_t* word;     // mapped: number of raises, less one
  uint32_t* count;    // in GPU memory: number of raises or awaits of the GPU, less one
  uint32_t* arrived;  // in GPU memory: blocks of a kernel that have ended, less one
};

struct SignalMemory {
  Buffer word{sizeof(uint32_t), Site::kMapped};
  Buffer counts{2 * sizeof(uint32_t), Site::kDevice};  // the GPU avoids reads over the link

  SignalWords words() const {
    return {word.as<uint32_t>(), counts.as<uint32_t>(), counts.as<uint32_t>() + 1};
  }
};

// One stream raises, one host thread awaits.
class SignalToHost {
 public:
  // Enqueues a raise. The object must outlive the work and every graph that recorded it.
  void raise(const Stream& stream);
  // For a kernel that raises with its last block, instead of raise().
  SignalWords words() const { return memory_.words(); }
  // For the host: consumes a raise if there is one.
  bool take();
  // For the host: waits for the next raise. Throws Error if work of `stream` has failed, since it
  // then never raises.
  void await(const Stream& stream);

 private:
  SignalMemory memory_;
  uint32_t n_taken_ = ~0u;  // the initial value of the words
};

class SignalToStream {
 public:
  // For the host: raises the signal.
  void raise();
  // Enqueues a wait for the next raise. A host that gives up must still raise, because the GPU
  // polls without a time limit.
  void await(const Stream& stream);
  // For a kernel whose blocks all await the next raise, instead of await().
  SignalWords words() const { return memory_.words(); }

 private:
  SignalMemory memory_;
  uint32_t n_raised_ = ~0u;
};

// Why streams cannot await this process, in one line with what to do; empty if they can. With
// CUDA_LAUNCH_BLOCKING, and under tools that run one kernel at a time, a launch returns only when
// its kernel has ended; a kernel that awaits a raise of the launching thread then never ends.
std::string why_no_hand_off(Stream& stream);

}  // namespace tandem::gpu
