// A GPU that is lost during a run, when it is emulated.
#pragma once
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>

#include "core/run_error.h"
#include "gpu_kernels/runtime.h"
#include "tests/error_of.h"

namespace tandem::test {

// After the next open_gpu() the n-th piece of work of its streams fails.
class LostAfter {
 public:
  explicit LostAfter(int64_t n) { setenv("TANDEM_GPU_LOST_AFTER", std::to_string(n).c_str(), 1); }
  ~LostAfter() {
    unsetenv("TANDEM_GPU_LOST_AFTER");
    gpu::open_gpu();
  }
  LostAfter(const LostAfter&) = delete;
};

// The error message of the CUDA implementation.
constexpr const char* kLost = "the GPU failed: unspecified launch failure (cudaErrorLaunchFailure,";

// Returns whether `work` completes on a GPU that is lost at its n-th piece of work. Otherwise it
// must throw RunError with the reason within a bounded time.
inline bool survives_loss_after(int64_t n, const std::function<void()>& work) {
  SCOPED_TRACE(testing::Message() << "lost at piece " << n);
  const LostAfter lost(n);
  gpu::open_gpu();
  const auto start = std::chrono::steady_clock::now();
  bool ended = false;
  const std::string said = error_of([&] {
    try {
      work();
      ended = true;
    } catch (const RunError&) {
      throw;
    } catch (const Error& error) {
      ADD_FAILURE() << "not RunError: " << error.what();
      throw;
    }
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(300)) << "soon";
  if (ended) return true;
  EXPECT_TRUE(says(said, kLost));
  return false;
}

// Runs `work` with a GPU lost at the first piece of work and at ever later ones, until it
// completes.
inline void expect_every_loss_is_said(const std::function<void()>& work) {
  int64_t n = 1;
  int n_lost = 0;
  for (; n < 10'000'000 && !survives_loss_after(n, work); n += 2 + n) ++n_lost;
  EXPECT_LT(n, 10'000'000);
  EXPECT_GE(n_lost, 6);
}

}  // namespace tandem::test
