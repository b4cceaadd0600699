// Ranks of which some compute on emulated GPUs and others on CPUs, as threads: logits and answers
// of one process on the CPU, in every grid and way of exchanging rows, with all experts of a rank
// on its GPU and with some beside it.
#include <gtest/gtest.h>

#include <random>

#include "engine/completion.h"
#include "model/cost.h"
#include "offload/plan/placement_json.h"
#include "tests/expert_moves.h"
#include "tests/golden_file.h"
#include "tests/gpu_memory.h"
#include "tests/gpu_ranks.h"
#include "tests/hybrid_placements.h"
#include "tests/rank_grids.h"

namespace tandem::test {
namespace {

constexpr ExpertDispatch kAuto = ExpertDispatch::kAuto, kGather = ExpertDispatch::kGather,
                         kAllToAll = ExpertDispatch::kAllToAll,
                         kLowLatency = ExpertDispatch::kLowLatency;

// A GPU and a CPU have a replica each, divide one, or have a stage each; and larger grids.
const std::vector<RankGrid> kGrids = {
    {.dp = 2, .tp = 1, .dispatch = kGather, .gpus = "gc"},
    {.dp = 1, .tp = 2, .gpus = "gc"},
    {.dp = 1, .tp = 1, .pp = 2, .gpus = "gc"},
    {.dp = 2, .tp = 1, .dispatch = kAllToAll, .gpus = "cg"},
    {.dp = 1, .tp = 3, .gpus = "cgg"},
    {.dp = 1, .tp = 1, .pp = 2, .gpus = "cg"},
    {.dp = 3, .tp = 1, .dispatch = kLowLatency, .gpus = "gcg"},
    {.dp = 1, .tp = 2, .dispatch = kGather, .gpus = "cg"},
    {.dp = 1, .tp = 2, .pp = 2, .gpus = "ggcc"},
    {.dp = 2, .tp = 2, .dispatch = kAllToAll, .gpus = "gcgc"},
    {.dp = 1, .tp = 4, .gpus = "gccc"},
    {.dp = 2, .tp = 1, .pp = 2, .gpus = "gccc"},
    {.dp = 2, .tp = 2, .dispatch = kLowLatency, .gpus = "cccg"},
    {.dp = 4, .tp = 1, .dispatch = kAllToAll, .hosts = {2, 2}, .gpus = "gcgc"},
    {.dp = 1, .tp = 2, .pp = 2, .gpus = "gccg"},
    {.dp = 2, .tp = 4, .dispatch = kGather, .gpus = "ggccgccc"},
    {.dp = 8, .tp = 1, .dispatch = kLowLatency, .gpus = "gcgcgcgc"},
    {.dp = 2, .tp = 2, .dispatch = kAllToAll, .pp = 2, .gpus = "gcccccgg"},
};

class RanksOfTwoKinds : public testing::TestWithParam<std::string> {};

// Every family has a third of the grids; make test-long computes the others.
TEST_P(RanksOfTwoKinds, HaveTheLogitsOfTheCpu) {
  const std::string directory = kGolden + GetParam();
  const std::vector<int32_t> tokens = golden_text(directory);
  LoadedModel cpu(reference_of(directory));
  const Logits want = logits_at_once(cpu, tokens, 1, 0)[0];
  const std::vector<std::string> families = families_without_ties(kGolden);
  const size_t family = std::ranges::find(families, GetParam()) - families.begin();
  ModelOptions options = reference_of(directory);
  options.device = DeviceChoice::kCuda;
  const int64_t half = bytes_for_experts([&] { return LoadedModel(options).device(); }, 0.5, 1000);
  for (size_t i = 0; i < kGrids.size(); ++i) {
    if ((i % 3 == family % 3) == is_long()) continue;
    for (const int64_t bytes : {half, kEnough}) {
      const LimitedGpuMemory memory(bytes);
      on_grid(kGrids[i], options, [&](LoadedModel& loaded) {
        SCOPED_TRACE(fmt::format("{}, {} bytes", kGrids[i].name(), bytes));
        for (const Logits& rows : logits_at_once(loaded, tokens, kGrids[i].dp + 1, 0))
          expect_close_logits(rows, want, 2e-2);
      });
    }
  }
}

// Each rank's GPU or CPU with a part of the backbone, several GPUs of a host or on hosts of their
// own, and experts on these GPUs and on the CPUs beside and between them, also several times where
// replicas exchange rows.
Placement random_placement_of_kinds(const ModelConfig& c, const RankGrid& grid,
                                    std::mt19937& random) {
  Placement p = backbone_on_gpu(c, kContext);
  p.stages.clear();
  DeviceId device = {-1, -1};
  const int n_of_stage = grid.dp * grid.tp;
  for (int i = 0; i < grid.pp; ++i) {
    Stage& stage = p.stages.emplace_back(
        Stage{c.n_layers * i / grid.pp, c.n_layers * (i + 1) / grid.pp - 1, {}, grid.tp});
    for (int k = 0; k < n_of_stage; ++k) {
      const bool on_gpu = grid.gpus[i * n_of_stage + k] == 'g';
      if (on_gpu && !device.is_cpu() && random() % 2 == 0)
        ++device.gpu;
      else
        device = {device.host + 1, on_gpu ? 0 : -1};
      stage.devices.push_back(device);
    }
    for (int l = stage.first; l <= stage.last; ++l) {
      if (!c.is_moe(l)) continue;
      LayerExperts layer = {l, l, {}};
      for (int e = 0; e < c.router.n_experts; ++e) {
        std::vector<DeviceId> owners;
        do {
          DeviceId owner = stage.devices[random() % n_of_stage];
          if (random() % 2 == 0) owner.gpu = -1;
          if (std::ranges::find(owners, owner) == owners.end()) owners.push_back(owner);
        } while (grid.dp > 1 && random() % 3 == 0);
        layer.groups.push_back({{e}, stored_expert_format(c), owners});
      }
      p.layers.push_back(layer);
    }
  }
  p.embedding_on_cpu = random() % 2;
  p.head_on_cpu = device.is_cpu();
  p.prefill_chunk_tokens = 1 + static_cast<int>(random() % 30);
  return p;
}

TEST_P(RanksOfTwoKinds, HaveTheLogitsOfTheCpuAsPlaced) {
  const LimitedGpuMemory memory(kEnough);
  const std::string directory = kGolden + GetParam();
  const std::vector<int32_t> tokens = golden_text(directory);
  LoadedModel cpu(reference_of(directory));
  const Logits want = logits_at_once(cpu, tokens, 1, 0)[0];
  std::mt19937 random(static_cast<unsigned>(std::hash<std::string>()(GetParam())));
  const std::vector<RankGrid> grids = {
      {.dp = 2, .tp = 1, .gpus = "gc"},
      {.dp = 1, .tp = 1, .pp = 2, .gpus = "cg"},
      {.dp = 3, .tp = 1, .dispatch = kAllToAll, .gpus = "ggc"},
      {.dp = 1, .tp = 2, .pp = 2, .gpus = "ggcc"},
      {.dp = 2, .tp = 2, .dispatch = kLowLatency, .gpus = "ccgg"},
      {.dp = 2, .tp = 1, .dispatch = kGather, .pp = 2, .gpus = "gcgg"}};
  for (const RankGrid& grid : grids) {
    const Placement placement = random_placement_of_kinds(cpu.config(), grid, random);
    const PlacementFile file(placement);
    ModelOptions options = as_placed(directory, file);
    options.device = DeviceChoice::kAuto;
    options.isa = cpu::Isa::kReference;
    RankGrid as_placed = grid;
    as_placed.gpus.clear();
    on_grid(as_placed, options, [&](LoadedModel& loaded) {
      SCOPED_TRACE(grid.name() + "\n" + placement_to_json(placement).dump());
      for (const Logits& rows : logits_at_once(loaded, tokens, grid.dp + 1, 0))
        expect_close_logits(rows, want, 2e-2);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Families, RanksOfTwoKinds,
                         testing::ValuesIn(families_without_ties(kGolden)),
                         [](const auto& info_of) { return info_of.param; });

}  // namespace
}  // namespace tandem::test
