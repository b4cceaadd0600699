// Whether all ranks still run while they prepare, for minutes perhaps, without calls of each other.
#pragma once
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "comm/group.h"

namespace tandem {

class Heartbeat {
 public:
  using OnLost = std::function<void(const GroupError&)>;
  // All ranks construct it together. On a thread of its own the ranks hear of each other every
  // `interval`; on_lost is called there when one does not answer within the patience, or has left.
  // The group outlives the object.
  Heartbeat(Group& group, OnLost on_lost, Patience patience = {},
            std::chrono::duration<double> interval = std::chrono::seconds(2));
  // A rank may leave before the others, and is then lost to them.
  ~Heartbeat() { stop(State::kLeaves); }
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  // Returns once all ranks have called it. A second call does nothing.
  void end() { stop(State::kReady); }

 private:
  enum class State : uint8_t { kPrepares, kReady, kLeaves };
  void stop(State state);
  void beat();
  void report(const GroupError& error);
  State own_state(std::chrono::duration<double> wait, State until);

  const std::unique_ptr<Group> group_;
  const OnLost on_lost_;
  const Patience patience_;
  const std::chrono::duration<double> interval_;
  std::mutex mutex_;  // guards state_
  std::condition_variable changed_;
  State state_ = State::kPrepares;
  std::thread thread_;  // the last member: it uses all others
};

}  // namespace tandem
