// The time of measurements.
#pragma once
#include <chrono>

namespace tandem {

// What measurements read as the time. Tests replace it by a clock of their own.
inline std::chrono::steady_clock::time_point (*measuring_clock)() = std::chrono::steady_clock::now;

// Runs from its construction on.
class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(measuring_clock() - start_).count();
  }

 private:
  const std::chrono::steady_clock::time_point start_ = measuring_clock();
};

double seconds_of(auto&& work) {
  const Stopwatch watch;
  work();
  return watch.seconds();
}

}  // namespace tandem
