// The scheduler of emulated GPU threads, for device.h: threads of a block are fibers that run alone
// until they synchronise (barrier, warp collective) or poll.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <source_location>

#include "core/check.h"
#include "gpu_kernels/runtime.h"

namespace tandem::gpu::emulated {

// A place of a kernel. It is one pointer, because each lane passes one with each collective.
using Where = std::source_location;

// Contribution of one lane to a collective.
struct alignas(16) Packet {
  uint32_t word[8];
};

// Aborts where CUDA would refuse the launch on the weakest supported GPU.
void check_shape(const LaunchShape& shape, Caller at);
// For tests of large grids: how many blocks run at each end of a grid, from TANDEM_GPU_BLOCKS; all
// blocks if unset.
int64_t blocks_option();
void run_grid(const LaunchShape& shape, int64_t n_at_ends,
              const std::function<void()>& thread_body);
void enqueue(const Stream& stream, std::function<void()> work);
void enqueue_kernel(const Stream& stream, const LaunchShape& shape, std::function<void()> work);

// While an object exists, allocations of its thread count as the emulator's own, like a driver's
// memory. Emulator threads always hold one.
class InDriver {
 public:
  InDriver();
  ~InDriver();
  InDriver(const InDriver&) = delete;
};
bool in_driver();  // true for this thread

// Counters since the program began. Tests use differences to measure the cost of a step or a
// kernel.
struct Counts {
  std::atomic<int64_t> buffers = 0;  // allocations
  // Waits of the host for the GPU, such as to free a buffer; not for events that have passed.
  std::atomic<int64_t> waits = 0;
  std::atomic<int64_t> copies = 0;       // cp.async of 16 bytes that read memory
  std::atomic<int64_t> collectives = 0;  // per lane: shuffles, matrix loads, mma
  std::atomic<int64_t> sent = 0;         // bytes to other ranks, but for all_reduce and broadcast
};
Counts& counts();

constexpr int64_t kGraphNodeBytes = 1024;  // a recording's memory, for Graph::bytes()

void sync_block(Where at);
// Counts a thread of a kernel with LaunchShape::early. run_grid() aborts unless all threads call
// it.
void begin_early();
// A collective of the lanes of `mask` begins: the calling lane writes its packet, and then calls
// meet(), which returns when all have done so, with the packets of all 32. `orders_memory` is for
// __syncwarp.
Packet& join(unsigned mask, Where at);
const Packet* meet(bool orders_memory);
// Tensor-core product of a warp: every lane passes its pieces of a and b and its piece of the sums
// as c, which is updated. Each sum is formed in ascending order of k, in float.
enum class Mma { kBf16, kE4m3 };  // m16n8k16, m16n8k32
void multiply(Mma kind, const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4], Where at);
void yield();
[[noreturn]] void fault(const char* what, Where at);
// Writes to to[n] the name of the emulated thread that runs on this CPU thread, or "the host".
void name_running_thread(char* to, size_t n);

void* shared_memory(int64_t bytes, Where at);
void check_shared(const void* p, int64_t bytes, int64_t alignment, Where at);

// cp.async completes as late as allowed: the destination holds NaN until the thread waits.
struct PendingCopy {
  void* to;
  const void* from;  // null: zeros
  int group;
};
void push_copy(PendingCopy copy);
void close_group();
bool pop_copy(int n_pending_groups, PendingCopy& out);

}  // namespace tandem::gpu::emulated
