// Decides when a thread of a team yields its core. Another process that shares the core preempts
// the thread anyway, at any moment; if that happens inside an item, the whole team waits for the
// item. A yield between two items delays no other thread.
#pragma once
#include <cstdint>

namespace tandem {

class CoreTurns {
 public:
  // Called after every item, at `now` (ns). preemptions() returns how often the thread has been
  // preempted so far; it is called only after an item that took long. Returns whether to yield now.
  template <class Preemptions>
  bool item_ended(int64_t now, Preemptions preemptions) {
    const bool took_long = now - last_ > kLong;
    last_ = now;
    if (took_long) {
      const int64_t n = preemptions();
      if (n != n_preemptions_) {
        n_preemptions_ = n;
        is_shared_ = true;
        turn_began_ = now;
      }
    }
    return is_shared_ && now - turn_began_ > kTurn;
  }
  // Called after a yield, when the thread runs again at `now` (ns). If the yield took less than
  // kNobody, no other process wants the core.
  void yielded(int64_t now) {
    if (now - last_ < kNobody) is_shared_ = false;
    last_ = turn_began_ = now;
  }

 private:
  // Times in ns. kTurn is below the slice of 2.8 to 4 ms that Linux grants, which it checks every 1
  // to 4 ms (EEVDF, base_slice_ns).
  static constexpr int64_t kTurn = 2'000'000, kLong = 500'000, kNobody = 100'000;

  int64_t last_ = 0, turn_began_ = 0, n_preemptions_ = 0;
  bool is_shared_ = false;
};

}  // namespace tandem
