// A clock for measurements that runs by itself: each reading is later than the one before, by steps
// that repeat after seven. A measured time is then known from the number of measurements before it.
#pragma once
#include <atomic>

#include "core/clock.h"

namespace tandem {

class FakeClock {
 public:
  using Duration = std::chrono::nanoseconds;

  // Steps of 1, 4, 7, 3, 6, 2, 5 times the unit, or of the unit alone.
  explicit FakeClock(Duration unit, bool varies = true) {
    unit_ = unit.count();
    varies_ = varies;
    restart();
    measuring_clock = [] {
      const int64_t reading = n_readings_++;
      const int64_t step = varies_ ? steps_at(reading) : 1;
      return std::chrono::steady_clock::time_point(Duration(now_ += step * unit_));
    };
  }
  ~FakeClock() { measuring_clock = std::chrono::steady_clock::now; }
  FakeClock(const FakeClock&) = delete;
  FakeClock& operator=(const FakeClock&) = delete;

  // The next step is the first again.
  static void restart() { n_readings_ = 0; }
  static void advance(Duration by) { now_ += by.count(); }
  static int64_t n_readings() { return n_readings_; }
  // The units between reading i and the one before.
  static int64_t steps_at(int64_t i) { return 1 + i * 3 % 7; }

 private:
  static inline std::atomic<int64_t> now_ = 0, n_readings_ = 0;
  static inline int64_t unit_ = 0;
  static inline bool varies_ = true;
};

}  // namespace tandem
