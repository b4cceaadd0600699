// Counts by which a stream and the CPU wait for each other without a call of the driver, also
// within a recorded graph. The n-th await ends with the n-th raise, whichever is first: nothing is
// reset, so none is lost. What was written before a raise, in mapped memory too, is seen after its
// await.
#pragma once
#include <string>

#include "gpu_kernels/runtime.h"

namespace tandem::gpu {

// One side raises from one stream, the other awaits on one thread.
class SignalToHost {
 public:
  // Enqueues the raise. The object outlives the work, and every graph that recorded it.
  void raise(const Stream& stream);
  // The host: takes a raise if there is one.
  bool take();
  // The host: takes the next raise once it has come. Throws Error when work of `stream` has failed,
  // which never raises then.
  void await(const Stream& stream);

 private:
  Buffer word_{sizeof(uint32_t), Site::kMapped};   // how often it was raised, less one
  Buffer count_{sizeof(uint32_t), Site::kDevice};  // the same: the card does not read over the link
  uint32_t n_taken_ = ~0u;                         // as both buffers begin
};

class SignalToStream {
 public:
  // The host.
  void raise();
  // Enqueues: what follows on the stream begins once the next raise has come. A host that gives up
  // must raise all the same: the card polls for ever.
  void await(const Stream& stream);

 private:
  Buffer word_{sizeof(uint32_t), Site::kMapped};   // how often it was raised, less one
  Buffer count_{sizeof(uint32_t), Site::kDevice};  // how many raises were awaited, less one
  uint32_t n_raised_ = ~0u;
};

// Why no stream can await this process: with CUDA_LAUNCH_BLOCKING, and under tools that run one
// kernel at a time, a launch returns when its kernel has ended, and a kernel that awaits a raise of
// the launching thread never does. In one line, with what to do; empty: launches return at once.
std::string why_no_hand_off(Stream& stream);

}  // namespace tandem::gpu
