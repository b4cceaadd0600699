// main() of the GPU kernel tests. Prints which GPU runs them; without one the exit status is 77
// (skipped).
#include <gtest/gtest.h>

#include <cstdio>

#include "core/check.h"
#include "gpu_kernels/gpu_facts.h"
#include "gpu_kernels/runtime.h"
#include "tests/tests_of_file.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  tandem::test::choose_tests_of_file(argv[0]);
  try {
    const tandem::gpu::GpuInfo info = tandem::gpu::open_gpu();
    std::printf("on %s, compute capability %d.%d", info.name.c_str(), info.major, info.minor);
    const tandem::gpu::CudaVersions cuda = tandem::gpu::cuda_versions();
    if (!info.emulated)
      std::printf(", built with CUDA %s, driver for CUDA %s",
                  tandem::gpu::version_text(cuda.toolkit).c_str(),
                  tandem::gpu::version_text(cuda.driver).c_str());
    std::puts("");
  } catch (const tandem::Error& e) {
    std::printf("skipped: %s\n", e.what());
    return 77;
  }
  return tandem::test::run_chosen();
}
