// When a thread of a team should give its core away of its own accord. Another process on that core
// gets its turn anyway, at any moment: then the thread is put aside with an item in hand, and the
// whole team waits for that item. Between two items nobody waits for it.
#pragma once
#include <cstdint>

namespace tandem {

class CoreTurns {
 public:
  // Called after every item, at `now` (ns). preemptions() counts how often the thread was put aside
  // so far; it is asked only after an item that took long. Returns whether to yield now.
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
  // The thread yielded, and had its core back at `now`: soon, if nobody else wants it.
  void yielded(int64_t now) {
    if (now - last_ < kNobody) is_shared_ = false;
    last_ = turn_began_ = now;
  }

 private:
  // Linux grants 2.8 to 4 ms and looks at its clock every 1 to 4 ms (EEVDF, base_slice_ns).
  static constexpr int64_t kTurn = 2'000'000, kLong = 500'000, kNobody = 100'000;

  int64_t last_ = 0, turn_began_ = 0, n_preemptions_ = 0;
  bool is_shared_ = false;
};

}  // namespace tandem
