#include "offload/workers/worker_fit.h"

#include <algorithm>

#include "core/check.h"

namespace tandem {
namespace {

std::vector<int> experts_of(const WorkerWelcome& worker) {
  std::vector<int> experts;
  for (size_t e = 0; e < worker.experts.size(); ++e)
    if (worker.experts[e]) experts.push_back(static_cast<int>(e));
  return experts;
}

// "0-3 and 4-7": the shards that workers have.
std::string text_of_shards(const std::vector<Shard>& shards) {
  std::string text;
  for (const Shard& shard : shards)
    if (!shard.owners.empty())
      text += (text.empty() ? "" : " and ") + text_of_experts(shard.experts);
  return text;
}

void require_whole_shards(const WorkerWelcome& worker, const std::vector<Shard>& shards) {
  bool has_any = false;
  for (const Shard& shard : shards) {
    if (shard.owners.empty()) continue;
    const auto n = std::count_if(shard.experts.begin(), shard.experts.end(),
                                 [&](int expert) { return worker.experts[expert]; });
    has_any = has_any || n > 0;
    require(n == 0 || n == std::ssize(shard.experts),
            "it has experts {}, and {} of them only in part: answers keep their bits where workers "
            "have whole shards, which are {}: start it with --experts of one or several of them, "
            "or start this program again",
            text_of_experts(experts_of(worker)), text_of_experts(shard.experts),
            text_of_shards(shards));
  }
  require(has_any,
          "it has experts {}, and workers are asked for {}: start it with --experts of these, or "
          "start this program again",
          text_of_experts(experts_of(worker)), text_of_shards(shards));
}

}  // namespace

WorkerNeeds needs_of(const std::vector<WorkerWelcome>& welcomes, int n_layers, int max_rows) {
  check(!welcomes.empty(), "a worker of the start");
  std::vector<std::vector<bool>> owned;
  bool takes_bf16 = true;
  for (const WorkerWelcome& welcome : welcomes) {
    owned.push_back(welcome.experts);
    takes_bf16 = takes_bf16 && welcome.takes_bf16;
  }
  const int n_experts = static_cast<int>(owned[0].size());
  WorkerNeeds needs = {.model = welcomes[0],
                       .shards = shards_of(owned, n_experts),
                       .arithmetic = {},
                       .rows = takes_bf16 ? RowType::kBf16 : RowType::kF32,
                       .max_rows = max_rows};
  needs.model.n_layers = n_layers;
  for (const Shard& shard : needs.shards)
    needs.arithmetic.push_back(shard.owners.empty() ? "" : welcomes[shard.owners[0]].arithmetic);
  return needs;
}

bool has_model(const WorkerWelcome& worker, const WorkerWelcome& model) {
  return worker.model == model.model && worker.n_active == model.n_active &&
         worker.dim == model.dim && worker.experts.size() == model.experts.size();
}

bool owns(const WorkerWelcome& worker, const Shard& shard) {
  return worker.experts[shard.experts.front()];
}

void require_fits(const WorkerWelcome& worker, const WorkerNeeds& needs) {
  require(has_model(worker, needs.model),
          "it has another model: start it with a copy of this program's checkpoint");
  require(worker.n_layers >= needs.model.n_layers,
          "it has experts of {} layers, and steps use {} with those for multi-token prediction: "
          "start it with --draft mtp",
          worker.n_layers, needs.model.n_layers);
  require(worker.max_rows >= needs.max_rows,
          "a step has up to {} tokens, and it takes {} rows: start it with --chunk {}",
          needs.max_rows, worker.max_rows, needs.max_rows);
  require_whole_shards(worker, needs.shards);
  for (size_t s = 0; s < needs.shards.size(); ++s)
    require(needs.shards[s].owners.empty() || !owns(worker, needs.shards[s]) ||
                worker.arithmetic == needs.arithmetic[s],
            "it would compute other sums of experts {} than the workers that have them (\"{}\" "
            "and \"{}\"): start it with the same --isa, --format and --threads",
            text_of_experts(needs.shards[s].experts), worker.arithmetic, needs.arithmetic[s]);
  require(needs.rows == RowType::kF32 || worker.takes_bf16,
          "other workers take rows of BF16, and it does not: start it with the same --isa");
}

}  // namespace tandem
