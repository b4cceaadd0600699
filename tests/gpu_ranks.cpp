#include "tests/gpu_ranks.h"

#include <gtest/gtest.h>

#include <array>

#include "comm/agreement.h"
#include "comm/local_ranks.h"
#include "loader/loaded_model.h"
#include "model/cost.h"
#include "tests/error_of.h"
#include "tests/golden_file.h"
#include "tests/planner_cases.h"
#include "tests/whole_models.h"

namespace tandem::test {

void on_ranks(int n, const std::function<void(Group&)>& work) {
  run_local_ranks({n}, [&](Group& group) {
    try {
      work(group);
    } catch (const AgreedError& error) {
      if (error.reported_here) ADD_FAILURE() << "rank " << group.rank() << ": " << error.what();
    }
  });
}

std::string refusal_of_two(const ModelOptions& options) {
  std::array<std::string, 2> said;
  run_local_ranks({2}, [&](Group& group) {
    said[group.rank()] = error_of([&] { LoadedModel{on_rank(options, group)}; });
  });
  return said[0] + said[1];
}

Placement backbone_on_gpus(const ModelConfig& c, int n_ranks, int tp) {
  Placement p = backbone_on_gpu(c, kContext);
  p.stages[0].tp = tp > 0 ? tp : n_ranks;
  p.stages[0].devices.clear();
  for (int rank = 0; rank < n_ranks; ++rank) p.stages[0].devices.push_back({0, rank});
  return p;
}

Placement sliced_placement(const ModelConfig& c, int n_ranks, int tp) {
  Placement p = backbone_on_gpus(c, n_ranks, tp);
  ExpertGroup all = {{}, stored_expert_format(c), p.stages[0].devices, true};
  for (int e = 0; e < c.router.n_experts; ++e) all.experts.push_back(e);
  p.layers.push_back({0, c.n_layers - 1, {all}});
  return p;
}

Placement random_placement_of_ranks(const ModelConfig& c, int n_ranks, std::mt19937& rng,
                                    bool with_cpu, int tp) {
  Placement p = backbone_on_gpus(c, n_ranks, tp);
  p.embedding_on_cpu = rng() % 2;
  p.prefill_chunk_tokens = 1 + static_cast<int>(rng() % 30);
  for (int l = 0; l < c.n_layers; ++l) {
    if (!c.is_moe(l)) continue;
    std::vector<ExpertGroup> groups(n_ranks + 1, ExpertGroup{{}, stored_expert_format(c), {}});
    for (int device = 0; device <= n_ranks; ++device)
      groups[device].owners = {device < n_ranks ? DeviceId{0, device} : kCpu};
    const unsigned n_devices = n_ranks + (with_cpu && rng() % 4 > 0);
    const unsigned first = rng() % 3 == 0;  // then the first GPU has none
    const bool replicated = rng() % 2;
    for (int e = 0; e < c.router.n_experts; ++e) {
      const unsigned owner = first + rng() % (n_devices - first);
      const unsigned other = first + rng() % (n_ranks - first);
      if (replicated && rng() % 3 == 0 && owner < static_cast<unsigned>(n_ranks) && other != owner)
        groups.push_back({{e},
                          stored_expert_format(c),
                          {{0, static_cast<int>(owner)}, {0, static_cast<int>(other)}}});
      else
        groups[owner].experts.push_back(e);
    }
    std::erase_if(groups, [](const ExpertGroup& group) { return group.experts.empty(); });
    p.layers.push_back({l, l, groups});
  }
  p.dense_replicated = rng() % 2;
  p.head_replicated = rng() % 2;
  return p;
}

std::vector<int32_t> golden_text(const std::string& directory) {
  const GoldenFile golden(directory + "/golden.safetensors");
  return golden.ints(golden.has("tokens_17") ? "tokens_17" : "tokens_5");
}

ModelOptions reference_of(const std::string& directory) {
  return {.directory = directory,
          .isa = cpu::Isa::kReference,
          .n_threads = 1,
          .context = kContext,
          .max_logits = 40};
}

ModelOptions as_placed(const std::string& directory, const PlacementFile& file) {
  return {.directory = directory,
          .device = DeviceChoice::kCuda,
          .max_logits = 40,
          .placement = file.path()};
}

}  // namespace tandem::test
