// Ranks that compute one model together make the same steps. Rank 0's engine decides them: what a
// step computes is announced here before it begins, and the other ranks repeat it. While nothing is
// computed they exchange heartbeats.
#pragma once
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/group.h"
#include "core/clock.h"
#include "engine/step_message.h"

namespace tandem {

class StepRunner;

class StepChannel {
 public:
  using OnLost = std::function<void(const GroupError&)>;
  // While nothing is computed the ranks hear of each other every `interval`, which is shorter than
  // the group's patience. `on_lost` is then called on a thread of its own when one does not answer.
  // The group outlives the channel and makes no other calls between the first step and the end.
  // on_begin: called on every rank when all are ready, before the first step.
  StepChannel(Group& group, OnLost on_lost, Clock::duration interval = std::chrono::seconds(3),
              std::function<void()> on_begin = {});
  ~StepChannel();
  StepChannel(const StepChannel&) = delete;
  StepChannel& operator=(const StepChannel&) = delete;

  bool leads() const { return group_.rank() == 0; }
  // On rank 0: whether it has begun and not ended.
  bool has_started() const { return started_ && !ended_; }
  // Adds a model, on all ranks in the same order; returns its number. On the other ranks it must
  // live until follow() returns.
  int add(StepRunner& runner, KvCache& cache);

  // Rank 0: from now on the other ranks wait as long as it takes. The first step begins by itself;
  // a command that may wait for its user before it calls this once all models are loaded. Throws as
  // announce() does.
  void begin();
  // Rank 0: tells the other ranks what it computes until the turn is over. Throws GroupError when a
  // rank is lost, and AgreedError when one has failed before the first step.
  using Turn = std::unique_lock<std::mutex>;
  Turn announce(const StepMessage& message);
  // Rank 0, in a turn: what the ranks have replied, one after another; n_bytes: [ranks].
  ConstBytes replies(std::span<const int64_t> n_bytes);
  // The same into `out`, which has as many bytes.
  void replies(std::span<const int64_t> n_bytes, Bytes out);
  // Rank 0, in a turn: the ranks get these bytes, whose number all know, and which stay as they
  // are.
  void give(Bytes bytes) { group_.broadcast(bytes, 0); }
  // Rank 0: the other ranks return from follow(). A second call does nothing.
  void end();
  // Other ranks: repeat the steps of rank 0 until end(). Throws what a step throws, and GroupError
  // when rank 0 is lost.
  void follow();

 private:
  struct Model {
    StepRunner& runner;
    KvCache& cache;
  };
  void begin_holding(const Turn& turn);
  void send(const StepMessage& message);
  void beat();
  std::span<const int32_t> receive();
  bool obey(const StepMessage& message);
  void reply(ConstBytes bytes);
  ConstBytes given(int64_t n_bytes);

  Group& group_;
  const OnLost on_lost_;
  const Clock::duration interval_;
  const std::function<void()> on_begin_;
  std::vector<Model> models_;
  std::vector<int32_t> message_;
  StepMessageReader reader_;
  std::vector<std::byte> replies_;  // of the others, or what rank 0 gives

  std::mutex mutex_;  // held while a step is computed; guards message_ and what is below
  std::condition_variable ended_changed_;
  bool started_ = false, ended_ = false;
  Clock::time_point last_;  // when something was sent
  std::thread heart_;       // the last member: it uses all others
};

}  // namespace tandem
