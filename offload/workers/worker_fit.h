// Whether a worker that comes while a backbone computes can be used. The bits of a text must not
// depend on who answers, so it has the backbone's model, computes as other owners of its experts
// do, and has each shard whole or not at all. A standby takes over shards whose owners compute as
// it does.
#pragma once
#include <string>
#include <vector>

#include "offload/workers/shards.h"
#include "transport/expert_messages.h"

namespace tandem {

// Says what decides the bits of this worker's sum of these experts, in any layer, of which those
// that it does not have count as in its memory: workers with the same text give the same bits.
std::string arithmetic_of(const WorkerWelcome& worker, const std::vector<int>& experts);

struct WorkerNeeds {
  WorkerWelcome model;        // has_model() compares; n_layers: as many as steps use
  std::vector<Shard> shards;  // as the workers of the start divide the experts
  // [shards] arithmetic_of() the owners; empty for experts of the backbone.
  std::vector<std::string> arithmetic;
  RowType rows;
  int max_rows;  // of a request
};

// What these workers, which are all that were there at the start, need of others. n_layers: with
// those that draft.
WorkerNeeds needs_of(const std::vector<WorkerWelcome>& welcomes, int n_layers, int max_rows);

// Whether both are of the same checkpoint, whatever layers they have of it.
bool has_model(const WorkerWelcome& worker, const WorkerWelcome& model);
// Whether the worker would compute what the owners of a shard do; false for the backbone's own.
bool may_own(const WorkerWelcome& worker, const WorkerNeeds& needs, size_t shard);
// Whether it has all experts of the shard too.
bool owns(const WorkerWelcome& worker, const WorkerNeeds& needs, size_t shard);
// Throws Error that says what does not fit. Experts that the backbone has itself do not count.
void require_fits(const WorkerWelcome& worker, const WorkerNeeds& needs);

}  // namespace tandem
