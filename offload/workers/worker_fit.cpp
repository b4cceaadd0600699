#include "offload/workers/worker_fit.h"

#include <algorithm>

#include "core/check.h"

namespace tandem {
namespace {

// [experts of all layers] of the shard, and those of them that the worker has.
struct PartOfShard {
  int64_t n_all = 0, n_here = 0;
};
PartOfShard part_of(const WorkerWelcome& worker, const Shard& shard) {
  PartOfShard part;
  for (size_t l = 0; l < shard.experts.size(); ++l) {
    part.n_all += std::ssize(shard.experts[l]);
    for (const int expert : shard.experts[l]) part.n_here += worker.experts[l][expert];
  }
  return part;
}

// "0-3 and 4-7": the shards that workers have.
std::string text_of_shards(const std::vector<Shard>& shards) {
  std::string text;
  for (const Shard& shard : shards)
    if (!shard.owners.empty()) text += (text.empty() ? "" : " and ") + text_of_shard(shard);
  return text;
}

void require_whole_shards(const WorkerWelcome& worker, const WorkerNeeds& needs) {
  bool is_of_use = false;
  for (size_t s = 0; s < needs.shards.size(); ++s) {
    const Shard& shard = needs.shards[s];
    if (shard.owners.empty()) continue;
    const auto [n_all, n] = part_of(worker, shard);
    is_of_use = is_of_use || n > 0;
    require(n == 0 || n == n_all,
            "it has experts {}, and {} of them only in part: answers keep their bits where workers "
            "have whole shards, which are {}: start it with --experts of one or several of them, "
            "or start this program again",
            text_of_layers(worker.experts), text_of_shard(shard), text_of_shards(needs.shards));
    require(n == 0 || may_own(worker, needs, s),
            "it would compute other sums of experts {} than the workers that have them (\"{}\" "
            "and \"{}\"): start it with the same --device, --isa, --format and --threads",
            text_of_shard(shard), arithmetic_of(worker, in_any_layer(shard)), needs.arithmetic[s]);
  }
  require(is_of_use,
          "it has experts {}, and workers are asked for {}: start it with --experts of these, or "
          "start this program again",
          text_of_layers(worker.experts), text_of_shards(needs.shards));
}

// A standby, which takes over whole shards and may have others in part.
void require_some_arithmetic(const WorkerWelcome& worker, const WorkerNeeds& needs) {
  std::string others;
  for (size_t s = 0; s < needs.shards.size(); ++s) {
    if (may_own(worker, needs, s)) return;
    if (needs.shards[s].owners.empty()) continue;
    others += fmt::format("{}experts {}: \"{}\"", others.empty() ? "" : ", ",
                          text_of_shard(needs.shards[s]), needs.arithmetic[s]);
  }
  fail(
      "it is a standby that would compute other sums (\"{}\") than all workers ({}): start it with "
      "the same --isa, --format and --threads; standbys compute on CPUs only",
      worker.arithmetic, others);
}

}  // namespace

std::string arithmetic_of(const WorkerWelcome& worker, const std::vector<int>& experts) {
  std::vector<int> on_gpu, in_memory;
  for (const int expert : experts)
    (!worker.on_gpu.empty() && worker.on_gpu[expert] ? on_gpu : in_memory).push_back(expert);
  if (on_gpu.empty()) return worker.arithmetic;
  if (in_memory.empty()) return worker.gpu_arithmetic;
  return fmt::format("experts {}: {}; experts {}: {}", text_of_experts(on_gpu),
                     worker.gpu_arithmetic, text_of_experts(in_memory), worker.arithmetic);
}

WorkerNeeds needs_of(const std::vector<WorkerWelcome>& welcomes, int n_layers, int max_rows) {
  check(!welcomes.empty(), "a worker of the start");
  std::vector<ExpertsOfLayers> owned;
  bool takes_bf16 = true;
  for (const WorkerWelcome& welcome : welcomes) {
    owned.push_back(welcome.experts);
    takes_bf16 = takes_bf16 && welcome.takes_bf16;
  }
  const int n_experts = static_cast<int>(owned[0].at(0).size());
  WorkerNeeds needs = {.model = welcomes[0],
                       .shards = shards_of(owned, n_layers, n_experts),
                       .arithmetic = {},
                       .rows = takes_bf16 ? RowType::kBf16 : RowType::kF32,
                       .max_rows = max_rows};
  needs.model.n_layers = n_layers;
  for (const Shard& shard : needs.shards)
    needs.arithmetic.push_back(
        shard.owners.empty() ? "" : arithmetic_of(welcomes[shard.owners[0]], in_any_layer(shard)));
  return needs;
}

bool has_model(const WorkerWelcome& worker, const WorkerWelcome& model) {
  return worker.model == model.model && worker.n_active == model.n_active &&
         worker.dim == model.dim && worker.n_layers > 0 &&
         worker.experts[0].size() == model.experts[0].size();
}

bool may_own(const WorkerWelcome& worker, const WorkerNeeds& needs, size_t shard) {
  const Shard& of = needs.shards[shard];
  return !of.owners.empty() && arithmetic_of(worker, in_any_layer(of)) == needs.arithmetic[shard];
}

bool owns(const WorkerWelcome& worker, const WorkerNeeds& needs, size_t shard) {
  const auto [n_all, n_here] = part_of(worker, needs.shards[shard]);
  return may_own(worker, needs, shard) && n_here == n_all;
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
  if (worker.is_standby)
    require_some_arithmetic(worker, needs);
  else
    require_whole_shards(worker, needs);
  require(needs.rows == RowType::kF32 || worker.takes_bf16,
          "other workers take rows of BF16, and it does not: start it with the same --isa");
}

}  // namespace tandem
