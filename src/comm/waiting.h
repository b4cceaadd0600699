// How a rank waits for another one: it spins shortly, then lets other threads have the core, and
// gives up in the end.
#pragma once
#include <immintrin.h>

#include <chrono>

#include "comm/group.h"
#include "core/yield_core.h"

namespace tandem {

// Returns whether done() held within the patience. The thread leaves its core to others: it looks
// every 50 us.
template <class Done>
bool sleep_for(const Done& done, Patience patience) {
  using Clock = std::chrono::steady_clock;
  for (const auto begin = Clock::now(); !done();) {
    if (Clock::now() - begin > patience.limit) return false;
    nap();
  }
  return true;
}

// Returns whether done() held within the patience. A short wait makes no system call. A longer one
// yields, so that ranks which share a core go on. After 50 ms the core sleeps in between; not
// earlier, because MPI moves a long message only while both sides call it. After a second, when
// nothing is computed, it sleeps longer: a rank of an idle server takes 4 % of a core.
template <class Done>
bool wait_for(const Done& done, Patience patience) {
  using Clock = std::chrono::steady_clock;
  using namespace std::chrono_literals;
  if (patience.sleeps) return sleep_for(done, patience);
  constexpr int kSpins = 200;
  for (int turn = 0; turn < kSpins; ++turn) {
    if (done()) return true;
    _mm_pause();
  }
  for (const auto begin = Clock::now(); !done();) {
    const auto waited = Clock::now() - begin;
    if (waited > patience.limit) return false;
    waited < 50ms ? yield_core() : nap(waited < 1s ? 50us : 500us);
  }
  return true;
}

}  // namespace tandem
