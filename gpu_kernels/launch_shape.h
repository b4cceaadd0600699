// What a kernel's launch needs of the runtime. Kernels include this instead of runtime.h, whose
// standard headers take nvcc longer than most kernels.
#pragma once
#include <cstdint>

namespace tandem::gpu {

class Stream;

// CUDA's limit of blocks along y and along z; along x it is 2^31 - 1.
constexpr int kMaxGridYz = 65535;
struct LaunchShape {
  int grid_x = 1, grid_y = 1, grid_z = 1;
  int threads = 128;         // per block
  int64_t shared_bytes = 0;  // dynamic shared memory per block
  bool co_resident = false;  // all blocks run concurrently, so they may wait for each other
  // Blocks may start while the kernel before in the stream still runs, where early_launches() of
  // gpu_facts.h. Every thread calls begin_early() before it reads or writes what other kernels do.
  bool early = false;
};

}  // namespace tandem::gpu
