// The scheduler of emulated GPU threads, as device.h uses it: a block's threads are fibers that run
// alone until they meet (barrier, warp collective) or poll.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>

#include "core/check.h"
#include "gpu_kernels/runtime.h"

namespace tandem::gpu::emulated {

using Where = Caller;

// What one lane gives to the others in a collective.
struct alignas(16) Packet {
  uint32_t word[8];
};

// Aborts where CUDA would not launch on the smallest of our targets.
void check_shape(const LaunchShape& shape, Where at);
// How many blocks run at each end of a grid that is launched now: all, or as many as
// TANDEM_GPU_BLOCKS says, for tests of grids that are too large to be emulated whole.
int64_t blocks_option();
void run_grid(const LaunchShape& shape, int64_t n_at_ends,
              const std::function<void()>& thread_body);
void enqueue(const Stream& stream, std::function<void()> work);
void enqueue_kernel(const Stream& stream, std::function<void()> work);

// While one lives, what its thread allocates is the emulator's own, as a driver's memory would be
// the driver's. Threads of the emulator are always in it.
class InDriver {
 public:
  InDriver();
  ~InDriver();
  InDriver(const InDriver&) = delete;
};
bool in_driver();  // this thread

// What was done since the program began. Tests see by differences what a step or a kernel costs.
struct Counts {
  std::atomic<int64_t> buffers = 0;  // that were allocated
  // Of the host for the card, as to free a buffer; not for events that are over.
  std::atomic<int64_t> waits = 0;
  std::atomic<int64_t> copies = 0;       // cp.async of 16 bytes, those that read memory
  std::atomic<int64_t> collectives = 0;  // of a lane: shuffles, matrix loads, products
};
Counts& counts();

void sync_block(Where at);
// Meets the lanes of `mask`; returns the packets of all 32. `orders_memory` for __syncwarp only.
const Packet* exchange(unsigned mask, const Packet& mine, bool orders_memory, Where at);
void yield();
[[noreturn]] void fault(const char* what, Where at);
// Into to[n]: the emulated thread that runs on this one, or the host.
void name_running_thread(char* to, size_t n);

void* shared_memory(int64_t bytes, Where at);
void check_shared(const void* p, int64_t bytes, int64_t alignment, Where at);

// cp.async is as late as it may be: the destination holds NaN until the thread waits.
struct PendingCopy {
  void* to;
  const void* from;  // null: zeros
  int group;
};
void push_copy(PendingCopy copy);
void close_group();
bool pop_copy(int n_pending_groups, PendingCopy& out);

}  // namespace tandem::gpu::emulated
