#include "offload/workers/worker_move.h"

#include <algorithm>

#include "offload/workers/shards.h"

namespace tandem {

WorkerHomes worker_homes(std::vector<WorkerHomes::Worker> workers, int n_layers) {
  const int n = static_cast<int>(workers.size()) + 1;
  WorkerHomes all{.workers = std::move(workers), .homes = {.n_ranks = n}};
  ExpertHomes& homes = all.homes;
  homes.ranks_of_layer.assign(n_layers, {0, n});
  homes.ranks.resize(n_layers);
  for (int layer = 0; layer < n_layers; ++layer) {
    std::vector<std::vector<int>>& of_layer = homes.ranks[layer];
    for (int w = 1; w < n; ++w) {
      const std::vector<bool>& experts = all.workers[w - 1].welcome.experts[layer];
      of_layer.resize(experts.size());
      for (const int expert : listed(experts)) of_layer[expert].push_back(w);
    }
    for (std::vector<int>& owners : of_layer)
      if (owners.empty()) owners.push_back(0);
  }
  const auto first = std::find_if(all.workers.begin(), all.workers.end(),
                                  [](const WorkerHomes::Worker& worker) { return worker.moves; });
  homes.fixed.assign(n, true);
  for (int w = 1; w < n; ++w) {
    const WorkerHomes::Worker& worker = all.workers[w - 1];
    homes.fixed[w] = !worker.moves || worker.welcome.arithmetic != first->welcome.arithmetic;
  }
  return all;
}

void keep_on_gpu(const std::vector<std::vector<bool>>& on_gpu, ExpertHomes& homes) {
  homes.on_gpu = on_gpu;
  for (size_t layer = 0; layer < on_gpu.size(); ++layer)
    for (const int expert : listed(on_gpu[layer])) homes.ranks[layer][expert] = {0};
}

WorkerMove worker_move(const WorkerHomes& homes, std::span<const ExpertChange> changes) {
  WorkerMove move;
  for (size_t w = 0; w < homes.workers.size(); ++w) {
    const auto& [address, welcome, moves] = homes.workers[w];
    const ExpertsOfLayers none(welcome.experts.size(),
                               std::vector<bool>(welcome.experts[0].size()));
    WorkerMove::Part part = {address, none, none};
    for (const auto& [layer, expert, owners] : changes) {
      const bool has = welcome.experts[layer][expert];
      const bool will =
          std::find(owners.begin(), owners.end(), static_cast<int>(w) + 1) != owners.end();
      if (will && !has) part.arriving[layer][expert] = true;
      if (has && !will) part.leaving[layer][expert] = true;
    }
    if (has_any(part.arriving) || has_any(part.leaving)) move.parts.push_back(std::move(part));
  }
  return move;
}

}  // namespace tandem
