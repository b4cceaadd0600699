// One turn of a wait for another thread or process, beside other work that wants the core.
#pragma once
#include <sched.h>
#include <time.h>

#include <chrono>

namespace tandem {

inline void nap(std::chrono::microseconds length = std::chrono::microseconds(50)) {
  const timespec time{0, length.count() * 1000};
  nanosleep(&time, nullptr);
}

// Lets other threads have this core. A core that other work uses comes back from a yield a
// scheduler's slice later, in milliseconds; a thread that sleeps has it again as soon as it wakes.
// So after a yield that took long, the next turns of this thread sleep.
inline void yield_core() {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::microseconds kLong{500}, kRemembered{100'000};
  static thread_local Clock::time_point sleeps_until{};
  const auto now = Clock::now();
  if (now < sleeps_until) return nap();
  sched_yield();
  if (Clock::now() - now > kLong) sleeps_until = now + kRemembered;
}

}  // namespace tandem
