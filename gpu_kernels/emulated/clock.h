// Emulation of cuda/clock.h for g++.
#pragma once
#include <chrono>
#include <cstdint>

namespace tandem::gpu {

inline uint64_t nanoseconds() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch() /
                               std::chrono::nanoseconds(1));
}

inline int64_t cycles() { return static_cast<int64_t>(nanoseconds()); }

}  // namespace tandem::gpu
