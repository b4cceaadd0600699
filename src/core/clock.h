// Durations in seconds, and the time of day.
#pragma once
#include <chrono>
#include <cstdint>

namespace tandem {

using Clock = std::chrono::steady_clock;

inline double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}
inline double seconds_since(Clock::time_point start) {
  return seconds_between(start, Clock::now());
}

// What measurements read as the time. Tests replace it by a clock of their own.
inline Clock::time_point (*measuring_clock)() = Clock::now;

// Runs from its construction on.
class Stopwatch {
 public:
  double seconds() const { return seconds_between(start_, measuring_clock()); }

 private:
  const Clock::time_point start_ = measuring_clock();
};

double seconds_of(auto&& work) {
  const Stopwatch watch;
  work();
  return watch.seconds();
}

inline int64_t seconds_since_1970() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace tandem
