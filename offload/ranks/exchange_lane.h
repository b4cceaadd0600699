// The exchanges of one micro-batch. Its rows and sums travel in a group of their own, either while
// the caller waits, or on a thread of the lane's own while the caller computes something else.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "core/background_thread.h"
#include "core/memory.h"
#include "offload/ranks/expert_exchange.h"

namespace tandem {

// How rows travel, and the exchange; none if another one is used.
struct ExchangeChoice {
  ExchangeMode mode = ExchangeMode::kGather;
  bool once_to_each_host = true;  // ExchangeShape::once_to_each_host
};
struct ExchangeWay {
  ExchangeChoice choice = {};
  std::unique_ptr<ExpertExchange> exchange;
};

class ExchangeLane {
 public:
  struct Limits {
    int n_ranks;
    int max_tokens;     // of a rank
    int decode_tokens;  // of a rank in a step that counts as decode
    int dim;
  };
  // Bytes of the lane's own buffers.
  static int64_t bytes_for(const Limits& limits, bool travels_apart) {
    const int64_t row = int64_t{limits.max_tokens} * limits.dim * 4;
    return row * limits.n_ranks + (travels_apart ? row : 0);
  }
  // The groups outlive the object. `travels_apart`: the lane has a thread, and the groups for
  // itself.
  ExchangeLane(HostGroups& groups, const Limits& limits, Patience patience, bool travels_apart);

  // Steps with more than decode_tokens use `prompts`, others use `decode` if there is one.
  void use(ExchangeWay prompts, ExchangeWay decode);
  const ExchangeWay& prompts() const { return prompts_; }
  const ExchangeWay& decode() const { return decode_; }

  // Called before the layers of a step: what each rank has, [ranks]. `apart`: on the lane's thread.
  void begin(std::span<const int64_t> n_tokens, bool apart);
  bool is_apart() const { return apart_; }

  // For each layer in this order; a call begins what it names, or waits for what was begun. Rows of
  // this rank's tokens leave.
  void send(const ExpertBatch& mine);
  // The rows that this rank computes, and zeros for their sums.
  struct Here {
    ExpertBatch batch;
    TensorView sums;
  };
  Here arrived();
  // The sums that were computed leave.
  void send_back();
  // y += the sums of this rank's tokens.
  void add_to(TensorView y);
  // Returns when the lane's thread uses none of the step's memory any more, also after an error.
  void settle() noexcept;

  // When the rows or sums that came last left and arrived, in seconds on one clock.
  struct Travel {
    double began = 0, ended = 0;
  };
  const Travel& last_travel() const { return last_travel_; }
  static double now();
  // Seconds since begin() in which the caller waited for other ranks.
  double seconds_waited() const { return seconds_waited_; }

 private:
  void start(const std::function<void()>& call);
  void wait();

  HostGroups& groups_;
  const Limits limits_;
  const Patience patience_;
  ExchangeWay prompts_, decode_;
  ExpertExchange* current_ = nullptr;  // of this step
  bool apart_ = false;
  double seconds_waited_ = 0;
  Travel last_travel_;

  ExpertBatch mine_ = {}, here_ = {};
  Buffer sums_;      // [rows that a rank may compute, dim]
  Buffer returned_;  // [max_tokens, dim] where the lane has a thread
  const std::function<void()> dispatch_, combine_;
  std::unique_ptr<BackgroundThread> thread_;  // the last member: it uses all others
};

}  // namespace tandem
