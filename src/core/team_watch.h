// Sees when a team hangs: a thread that never ends its item keeps everybody waiting, the GPU among
// them, and cannot be unwound.
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
  // Calls on_hang once, from a thread of its own, when the team has work and neither begins nor
  // ends an item for that long; time in which the program was stopped (Ctrl-Z) does not count. The
  // team outlives the object.
  TeamWatch(const Team& team, std::chrono::milliseconds patience, std::function<void()> on_hang);
  ~TeamWatch();
  TeamWatch(const TeamWatch&) = delete;
  TeamWatch& operator=(const TeamWatch&) = delete;

 private:
  static constexpr int kLooks = 8;  // within the patience
  void look(std::chrono::milliseconds between, const std::function<void()>& on_hang);

  const Team& team_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace tandem
