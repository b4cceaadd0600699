// Decides whether a GPU can be used, from facts that CUDA reports but without calling CUDA, so that
// tests cover every case on any machine. Also formats the message for a GPU that failed.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "core/invariant.h"

namespace tandem::gpu {

// Facts in the order in which CUDA is queried; after the first problem, later fields are unset.
struct GpuFacts {
  enum class Count : uint8_t { kDone, kDriverTooOld, kFailed };
  enum class Kernels : uint8_t { kThere, kForOthers, kPtxTooNew };

  // CUDA version that the driver supports, 1000 * major + 10 * minor; 0: no driver.
  int driver = 0;
  int toolkit = 0;  // CUDA version of the build, likewise
  Count count = Count::kDone;
  std::string count_error;  // CUDA's message for kFailed
  int n_gpus = 0;
  std::string name, id;               // of the first GPU, as in GpuInfo
  int major = 0, minor = 0;           // its compute capability
  Kernels kernels = Kernels::kThere;  // whether the program's kernels run on this GPU
  int compiled_for = 0;               // 10 * major + minor of the kernels' PTX; a GPU may be newer
};

// The value of CUDA_VISIBLE_DEVICES that leaves the index-th GPU of those that `visible` lists, or
// of all; empty, which leaves none, where the list is shorter. A list of one leaves that one for
// any index: srun --gpus-per-task 1 gives each rank a list of its own.
std::string only_gpu(std::optional<std::string> visible, int index);

// Why the GPU cannot be used and what to do, in one line; empty if it can be used.
std::string why_not(const GpuFacts& facts);

// True if kernels with FP8 mma run, which needs compute capability 8.9 of both the GPU and the
// program's PTX.
bool has_fp8_mma(const GpuFacts& facts);

// Dense BF16 operations per second with float sums, as the GPU's data sheet gives them; 0 where no
// data sheet confirms the rule. `kilohertz`: the highest clock, as CUDA reports it.
double datasheet_bf16_ops_per_second(const GpuFacts& facts, int n_multiprocessors, int kilohertz);

// Versions as in GpuFacts; 0 on the emulated GPU.
struct CudaVersions {
  int driver = 0, toolkit = 0;
};
CudaVersions cuda_versions();
// "13.0" for 13000.
std::string version_text(int cuda_version);

// The message for work that failed on the GPU, from CUDA's message and name for the error.
std::string failure_text(const char* what, const char* name, Caller at);

// For tests: limits the GPU memory to TANDEM_GPU_MEMORY bytes. 0 means that there is no GPU.
std::optional<int64_t> memory_option();
// For tests: the emulated GPU's compute capability, 10 * major + minor, from TANDEM_GPU_CAPABILITY.
int capability_option();
// For tests: whether the emulated GPU has a display (GpuInfo::ends_long_kernels), from
// TANDEM_GPU_WATCHDOG=1.
bool watchdog_option();

// Whether kernels with LaunchShape::early start early (programmatic dependent launch): with
// TANDEM_GPU_EARLY=1 on a GPU of compute capability 9.0 or later. It is not the default: an H200
// computes the same with it, but what it brings has not been measured.
bool early_launches(int major);

}  // namespace tandem::gpu
