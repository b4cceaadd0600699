// A batch of rows divided by shards: each part has the rows that use experts of one shard, and is
// the body of the request that asks a worker for their sums.
#pragma once
#include <vector>

#include "core/clock.h"
#include "offload/workers/shards.h"
#include "ops/expert_pool.h"
#include "transport/expert_messages.h"

namespace tandem {

struct ShardPart {
  enum class State : uint8_t { kUnused, kWaits, kSent, kAnswered };
  const Shard* shard;
  State state = State::kUnused;
  std::vector<int32_t> rows;   // of the batch, ascending
  std::vector<int32_t> ids;    // [rows, n_active], -1 for experts of other shards
  std::vector<float> weights;  // [rows, n_active]
  int64_t first_sum = 0;       // place of the first answered row among the sums of all parts
  int worker = -1;             // that has the request
  int n_lost = 0;              // workers that were lost with it
  uint64_t number = 0;         // of the request
  Clock::time_point sent_at{};
  RequestHead head;
  std::vector<MessageBytes> body;

  bool is_done() const { return state == State::kUnused || state == State::kAnswered; }
};

class ShardedBatch {
 public:
  // For batches of up to max_rows rows. `shards` outlives the object.
  ShardedBatch(const std::vector<Shard>& shards, const RequestShape& shape, int max_rows);

  // Sorts the pairs of a batch by shard. Its parts wait to be sent.
  void divide(const ExpertBatch& batch);
  const ExpertBatch& batch() const { return batch_; }
  // The batch with the experts that no worker has.
  ExpertBatch local() const;
  bool has_local() const { return has_local_; }

  std::vector<ShardPart>& parts() { return parts_; }  // [shards]; unused for the backbone's own
  const std::vector<ShardPart>& parts() const { return parts_; }
  // Sets part.head and part.body. rows [.., dim] are those of the batch in `type`.
  void write_request(ShardPart& part, RowType type, const std::byte* rows, int64_t row_bytes) const;
  // [rows] that are with this worker, or were answered by it.
  int64_t rows_of(int worker) const;
  bool is_done() const;

 private:
  const RequestShape shape_;
  std::vector<std::vector<int>> shard_of_;  // [layers][n_experts]
  std::vector<ShardPart> parts_;            // [shards]
  std::vector<int32_t> local_ids_;          // [max_rows, n_active]
  int local_shard_ = -1;                    // -1: workers have all experts
  ExpertBatch batch_ = {};
  bool has_local_ = false;
};

}  // namespace tandem
