// Routed experts of which other processes compute some: the rows of a layer go to workers, this
// process computes the experts that it has itself meanwhile, and the sums are added in an order
// that does not depend on who answered. A worker that is lost is replaced by another owner of its
// experts within the step.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/background_thread.h"
#include "core/memory.h"
#include "offload/cpu_experts.h"
#include "offload/workers/sharded_batch.h"
#include "offload/workers/worker_group.h"

namespace tandem {

struct WorkerExpertsParts {
  const std::vector<WorkerWelcome>& welcomes;  // [workers] what each has answered to ask()
  Transport& transport;
  const cpu::KernelTable& kernels;
  const ModelConfig& config;
  CpuExperts& local;  // has at least the experts that no worker has
  Team& team;
  int max_tokens;  // of a step
  // How long a step waits for a worker where all owners of an expert are down.
  std::chrono::duration<double> patience{10};
  // A wait in a step ends after so long also where a worker or a standby gets on: ranks that
  // compute the same step do not wait longer.
  std::chrono::duration<double> longest_wait = std::chrono::duration<double>::max();
  int micro_batches = 1;  // of every step, or kMeasured
  // Called with one line: what the user should know.
  std::function<void(const std::string&)> warn = [](const std::string&) {};
};

// Each micro-batch of a step has its requests under way while the backbone computes others. The
// thread that computes the step also has the connections; where much is to be sent or received, a
// thread of the pool has them while the backbone computes, and never both at a time.
class WorkerExperts final : public ExpertPool, private AnswerSink {
 public:
  // The pool keeps the links [workers]. What `parts` refers to outlives the pool.
  WorkerExperts(const WorkerExpertsParts& parts, std::vector<std::unique_ptr<WorkerLink>> links);
  ~WorkerExperts() override;

  // Waits until all workers are up, for at most `patience`, and returns whether they are.
  bool await_workers();
  // Workers that come and go: WorkerGroup's update() and is_up().
  void update_workers(const std::vector<std::string>& listed) { workers_.update(listed); }
  bool is_up(const std::string& address) const { return workers_.is_up(address); }

  // Also for a micro-batch without rows for workers: it must not overtake those before it, whose
  // keys it needs in the next layer.
  bool waits(Ticket) override { return n_micro_batches_ > 1; }
  void add_to(Ticket ticket, TensorView y) override;
  void begin_step(std::span<const Batch> replicas, int n_micro_batches) override;
  int micro_batches(std::span<const Batch>, bool) const override { return p_.micro_batches; }
  std::optional<double> seconds_waited() const override { return seconds_waited_; }
  std::vector<WorkerStatus> workers() const override { return workers_.status(); }
  const std::vector<Shard>& shards() const { return workers_.shards(); }

  // Between steps: experts that move between workers, as WorkerGroup's calls.
  WorkerHomes homes() const;
  std::vector<int64_t> version_of_homes() const { return workers_.version_of_homes(); }
  void begin_move(const WorkerHomes& homes, std::span<const ExpertChange> changes) {
    workers_.begin_move(homes, changes);
  }
  WorkerMoveState move_state() const { return workers_.move_state(); }
  std::string finish_move();
  void give_up_move() { workers_.give_up_move(); }

 private:
  // A ticket.
  struct Work {
    ShardedBatch rows;
    bool is_submitted = false;
  };

  Ticket start(const ExpertBatch& batch) override;
  std::span<std::byte> place_of_answer(uint64_t number, uint64_t n_bytes) override;
  void answered(uint64_t number) override;

  void prepare();
  void encode(const ExpertBatch& batch);
  void compute_local(Work& work);
  void add(const Work& work, TensorView y);
  TensorView sums_of(const ExpertBatch& batch) const;
  void make_room_for_workers();
  void take_links();
  void leave_links();
  void carry();
  bool carries_much() const;
  void exchange();
  void send_waiting();
  int best_owner(const Work& work, const ShardPart& part) const;
  void send(Work& work, ShardPart& part, int worker);
  void await(const Work& work);
  void lost(int worker);
  void require_patience(const ShardPart& part);
  void require_time_left(const Work& work, Clock::time_point begin);
  std::string owners_of(const ShardPart& part) const;
  [[noreturn]] void fail(const std::string& why);
  std::chrono::nanoseconds longest_sleep() const;
  std::span<MessageConnection* const> waited();
  void end_tickets();

  struct Request {
    Work* work = nullptr;
    ShardPart* part = nullptr;
  };
  Request request_of(uint64_t number);

  // How the step uses a link. kLost: the connection was found lost, which lost() has not seen yet.
  enum class Use : uint8_t { kNone, kTaken, kLost };

  const WorkerExpertsParts p_;
  const RequestShape shape_;
  const std::unique_ptr<MessageWaiter> waiter_;
  WorkerGroup workers_;  // the threads of its links use waiter_
  const RowType row_type_;
  int local_shard_ = -1;         // -1: workers have all experts
  int most_answers_ = 0;         // workers' shards that a row uses at most
  std::vector<Work> works_;      // by micro-batch
  bool has_local_sums_ = false;  // p_.local has those of the ticket that is added
  Buffer encoded_;               // [tokens of a step, dim] BF16 rows
  Buffer sums_;                  // kF32 [tokens of a step, most_answers_, dim]
  std::vector<Use> uses_;        // [workers]
  std::vector<MessageConnection*> waited_;
  int n_micro_batches_ = 1;  // of the step
  double seconds_waited_ = 0;
  uint64_t last_number_ = 0;

  const std::function<void()> carry_;
  std::atomic<bool> stops_carrying_{false};
  bool is_carrying_ = false;
  BackgroundThread courier_{BackgroundThread::Wakes::kAtOnce};  // the last member: uses all others
};

}  // namespace tandem
