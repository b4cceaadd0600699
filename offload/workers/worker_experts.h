// Routed experts of which other processes compute some: the rows of a layer go to workers, this
// process computes the experts that it has itself meanwhile, and the sums are added in an order
// that does not depend on who answered. A worker that is lost is replaced by another owner of its
// experts within the step.
#pragma once
#include <memory>
#include <vector>

#include "core/memory.h"
#include "offload/cpu_experts.h"
#include "offload/workers/shards.h"
#include "offload/workers/worker_link.h"

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
};

class WorkerExperts final : public ExpertPool, private AnswerSink {
 public:
  // The pool keeps the links [workers]. What `parts` refers to outlives the pool.
  WorkerExperts(const WorkerExpertsParts& parts, std::vector<std::unique_ptr<WorkerLink>> links);

  // Waits until all workers are up, for at most `patience`, and returns whether they are.
  bool await_workers();

  void add_to(Ticket ticket, TensorView y) override;
  std::vector<WorkerStatus> workers() const override;
  const std::vector<Shard>& shards() const { return shards_; }

 private:
  // The rows of a batch that use a shard, and the request that asks for their sums.
  struct Part {
    enum class State : uint8_t { kUnused, kWaits, kSent, kAnswered };
    const Shard* shard;
    State state = State::kUnused;
    std::vector<int32_t> rows;   // of the batch, ascending
    std::vector<int32_t> ids;    // [rows, n_active], -1 for experts of other shards
    std::vector<float> weights;  // [rows, n_active]
    int64_t first_sum = 0;       // row of sums_ with the first answer
    int worker = -1;             // that has the request
    int n_lost = 0;              // workers that were lost with it
    uint64_t number = 0;         // of the request
    Clock::time_point sent_at{};
    RequestHead head;
    std::vector<MessageBytes> body;
  };

  Ticket start(const ExpertBatch& batch) override;
  std::span<std::byte> place_of_answer(uint64_t number, uint64_t n_bytes) override;
  void answered(uint64_t number) override;

  bool divide(const ExpertBatch& batch);
  void encode(const ExpertBatch& batch);
  const std::byte* row(const ExpertBatch& batch, int64_t token) const;
  void send_waiting();
  int best_owner(const Part& part);
  bool send(Part& part, int worker);
  template <class Done>
  void exchange_until(const Done& done);
  void lost(int worker);
  void require_patience(const Part& part);
  std::string owners_of(const Part& part) const;
  [[noreturn]] void fail(const std::string& why);
  std::chrono::nanoseconds longest_sleep() const;
  void end_ticket();
  Part* part_of(uint64_t number);

  const WorkerExpertsParts p_;
  const std::vector<Shard> shards_;
  const RequestShape shape_;
  const RowType row_type_;
  const std::unique_ptr<MessageWaiter> waiter_;
  std::vector<int> shard_of_;         // [n_experts]
  std::vector<Part> parts_;           // [shards]; unused for the shard of this process
  std::vector<int32_t> local_ids_;    // [tokens, n_active]
  int local_shard_ = -1;              // -1: workers have all experts
  bool computes_local_ = false;       // this process has a part of the ticket under way
  Buffer encoded_;                    // [tokens, dim] BF16 rows of the batch
  Buffer sums_;                       // kF32 [answered rows, dim]
  std::vector<bool> taken_;           // [workers] whose link the ticket uses
  std::vector<int64_t> n_rows_sent_;  // [workers] in this ticket
  std::vector<MessageConnection*> waited_;
  ExpertBatch batch_;
  bool is_submitted_ = false;
  uint64_t last_number_ = 0;
  std::vector<std::unique_ptr<WorkerLink>> links_;  // the last member: their threads use waiter_
};

}  // namespace tandem
