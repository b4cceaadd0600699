#include "loader/arithmetic.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <span>
#include <vector>

#include "io/packed_header.h"
#include "offload/workers/shards.h"
#include "offload/workers/worker_fit.h"

namespace tandem {
namespace {

// As "int8", or "int8 from layer 3 on, int4 from layer 10 on".
std::string formats_text(const ExpertsLayout& layout, const ModelConfig& config) {
  const auto name = [&](int layer) {
    return layout.format(layer) ? format_name(*layout.format(layer)) : "as stored";
  };
  if (layout.of_layers().empty()) return name(0);
  std::string text, last;
  for (int layer = 0; layer < config.n_layers; ++layer) {
    if (!config.is_moe(layer) || name(layer) == last) continue;
    last = name(layer);
    text += fmt::format("{}{} from layer {} on", text.empty() ? "" : ", ", last, layer);
  }
  return text;
}

// Of the ranks of every expert.
uint64_t checksum_of_division(const ExpertOwners& owners) {
  std::vector<int32_t> ranks;  // of one expert after the other, each ended by -1
  for (int layer = 0; layer < owners.n_layers(); ++layer)
    for (int expert = 0; expert < owners.n_experts(); ++expert) {
      for (const int rank : owners.ranks(layer, expert)) ranks.push_back(rank);
      ranks.push_back(-1);
    }
  return checksum_of(std::as_bytes(std::span(ranks)));
}

}  // namespace

std::string arithmetic_text(const cpu::KernelTable& kernels, const ExpertsLayout& layout,
                            const ModelWeights& weights, const ModelConfig& config) {
  std::string text =
      fmt::format("kernels {}, experts {}, columns", kernels.name, formats_text(layout, config));
  if (weights.slices.empty()) text += fmt::format(" {}", config.expert_dim);
  for (const Slice& slice : weights.slices) text += fmt::format(" {}", slice.n);
  return text;
}

std::string arithmetic_of_workers(const AskedWorkers& asked) {
  std::vector<std::string> all;
  for (const WorkerWelcome& worker : asked.welcomes)
    if (has_any(worker.experts))  // else it is a standby
      all.push_back(fmt::format("experts {} ({})", text_of_layers(worker.experts),
                                arithmetic_of(worker, in_any_layer(worker.experts))));
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return fmt::format("{}", fmt::join(all, ", "));
}

std::string arithmetic_of_ranks(const SumsOfRanks& sums) {
  const auto& [grid, owners, has_slices, ways, ways_decide] = sums;
  std::string text;
  if (grid.tp > 1) text += fmt::format(", backbone divided by {} ranks", grid.tp);
  if (grid.n_of_stage() == 1) return text;
  if (has_slices)
    text += fmt::format(", columns of experts by {}", grid.n_of_stage());
  else
    text += fmt::format(", experts by {} (division {:016x}{})", grid.n_of_stage(),
                        checksum_of_division(owners),
                        owners.has_replicas() ? fmt::format(", {}", name_of(owners.choice())) : "");
  if (!ways.empty()) text += ", whose rows travel";
  if (!ways.empty() && ways_decide) text += " for " + ways;
  return text;
}

}  // namespace tandem
