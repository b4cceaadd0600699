// main() of the GPU kernel tests. Prints which GPU runs them; without one the exit status is 77
// (skipped).
#include <gtest/gtest.h>

#include <cstdio>

#include "core/check.h"
#include "gpu_kernels/card_check.h"
#include "gpu_kernels/runtime.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  try {
    const tandem::gpu::GpuInfo card = tandem::gpu::open_gpu();
    std::printf("on %s, compute capability %d.%d", card.name.c_str(), card.major, card.minor);
    const tandem::gpu::CudaVersions cuda = tandem::gpu::cuda_versions();
    if (!card.emulated)
      std::printf(", built with CUDA %s, driver for CUDA %s",
                  tandem::gpu::version_text(cuda.toolkit).c_str(),
                  tandem::gpu::version_text(cuda.driver).c_str());
    std::puts("");
  } catch (const tandem::Error& e) {
    std::printf("skipped: %s\n", e.what());
    return 77;
  }
  return RUN_ALL_TESTS();
}
