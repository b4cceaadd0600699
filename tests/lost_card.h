// A card that is lost in mid-run, where it is emulated.
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

// From the next open_gpu() on: its streams' n-th piece of work fails.
class LostAfter {
 public:
  explicit LostAfter(int64_t n) { setenv("TANDEM_GPU_LOST_AFTER", std::to_string(n).c_str(), 1); }
  ~LostAfter() {
    unsetenv("TANDEM_GPU_LOST_AFTER");
    gpu::open_gpu();
  }
  LostAfter(const LostAfter&) = delete;
};

// As CUDA's path says it.
constexpr const char* kLost = "the GPU failed: unspecified launch failure (cudaErrorLaunchFailure,";

// Whether `work` came to its end on a card that is lost at its n-th piece of work; otherwise it
// must have thrown RunError, which says why, and soon.
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

// Lost at the first piece of work, and ever later, until nothing is lost any more.
inline void expect_every_loss_is_said(const std::function<void()>& work) {
  int64_t n = 1;
  int n_lost = 0;
  for (; n < 10'000'000 && !survives_loss_after(n, work); n += 2 + n) ++n_lost;
  EXPECT_LT(n, 10'000'000);
  EXPECT_GE(n_lost, 6);
}

}  // namespace tandem::test
