// Whether all ranks still run while they prepare, or compute a step, for minutes perhaps, without
// calls of each other.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

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

  // Ranks that wait in steps for what is not a rank, and may so compute for long, go on until the
  // program ends instead of until the first step. All ranks say so, or none.
  void go_on_in_steps() { goes_on_ = true; }
  bool goes_on_in_steps() const { return goes_on_; }

  // What ranks tell each other at every beat.
  struct News {
    std::function<std::string()> mine;                           // a few KB
    std::function<void(std::span<const std::string>)> of_ranks;  // [ranks]
  };
  // From the next beat on all hear what `mine` gives. Both functions are called on the heartbeat's
  // thread. Returns false, and does nothing, while another teller's are told.
  bool tell(const void* teller, News news);
  // Neither function of this teller is called any more when it returns.
  void forget(const void* teller);

 private:
  enum class State : uint8_t { kPrepares, kReady, kLeaves };
  struct Beat {
    State state;
    int64_t n_bytes;  // of news
  };
  void stop(State state);
  void beat();
  std::string own_news();
  void hear_news(const std::string& mine, std::span<const int64_t> n_bytes);
  void report(const GroupError& error);
  State own_state(std::chrono::duration<double> wait, State until);

  const std::unique_ptr<Group> group_;
  const OnLost on_lost_;
  const Patience patience_;
  const std::chrono::duration<double> interval_;
  std::mutex mutex_;  // guards state_
  std::condition_variable changed_;
  State state_ = State::kPrepares;
  std::atomic<bool> goes_on_{false};
  std::mutex news_mutex_;  // guards the two below; held while a function of theirs is called
  const void* teller_ = nullptr;
  News news_;
  std::thread thread_;  // the last member: it uses all others
};

}  // namespace tandem
