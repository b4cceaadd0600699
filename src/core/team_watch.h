// Detects that a team hangs. A thread that never ends its item blocks all others and the GPU, and
// cannot be unwound.
#pragma once
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "core/team.h"

namespace tandem {

class TeamWatch {
 public:
  // Calls on_hang, from a thread of its own, when the team has work and neither begins nor ends an
  // item for `patience`; once per hang. Time in which the program was stopped (Ctrl-Z) does not
  // count. `team` must outlive this object.
  TeamWatch(const Team& team, std::chrono::milliseconds patience, std::function<void()> on_hang);
  ~TeamWatch();
  TeamWatch(const TeamWatch&) = delete;
  TeamWatch& operator=(const TeamWatch&) = delete;

 private:
  static constexpr int kLooks = 8;  // looks at the progress within `patience`
  void look(std::chrono::milliseconds between, const std::function<void()>& on_hang);

  const Team& team_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace tandem
