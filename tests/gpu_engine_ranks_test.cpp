// Models of all families on the GPUs of several ranks, which are threads here, with emulated GPUs:
// logits, as placements and plans divide them.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <set>

#include "engine/engine.h"
#include "model/checkpoint.h"
#include "model/cost.h"
#include "offload/gpu/exchange/cuda_ways.h"
#include "scheduling/scheduler.h"
#include "tests/check_close.h"
#include "tests/expert_moves.h"
#include "tests/fake_checkpoint.h"
#include "tests/golden_file.h"
#include "tests/gpu_memory.h"
#include "tests/gpu_ranks.h"
#include "tests/hybrid_placements.h"
#include "tests/planner_cases.h"
#include "tests/whole_models.h"

namespace tandem::test {
namespace {

// A random model whose backbone several GPUs can divide; no ties between experts.
class SmallModel {
 public:
  SmallModel(int n_layers, int expert_dim) {
    write_random_model(dir_, {{"vocab_size", 160},
                              {"num_hidden_layers", n_layers},
                              {"first_k_dense_replace", 1},
                              {"intermediate_size", 256},
                              {"moe_intermediate_size", expert_dim},
                              {"num_experts_per_tok", 8},
                              {"n_group", 1},
                              {"num_attention_heads", 4},
                              {"kv_lora_rank", 64},
                              {"qk_nope_head_dim", 32},
                              {"qk_rope_head_dim", 32},
                              {"v_head_dim", 64}});
    std::iota(tokens_.begin(), tokens_.end(), 100);
  }
  std::string directory() const { return dir_.path(); }
  const std::vector<int32_t>& tokens() const { return tokens_; }

 private:
  const TempDirectory dir_;
  std::vector<int32_t> tokens_ = std::vector<int32_t>(21);
};

class GpuRanks : public testing::TestWithParam<std::string> {};

TEST_P(GpuRanks, HaveTheLogitsOfTheCpu) {
  const LimitedGpuMemory memory(kEnough);
  const std::string directory = kGolden + GetParam();
  const std::vector<int32_t> tokens = golden_text(directory);
  LoadedModel cpu(reference_of(directory));
  const Logits want = logits_after(cpu, tokens);
  std::mt19937 rng(static_cast<unsigned>(std::hash<std::string>()(GetParam())));
  for (const int n_ranks : {2, 3}) {
    const Placement placement = random_placement_of_ranks(cpu.config(), n_ranks, rng, n_ranks == 2);
    const PlacementFile file(placement);
    std::vector<Logits> got(n_ranks);
    on_ranks(n_ranks, [&](Group& group) {
      LoadedModel loaded(on_rank(as_placed(directory, file), group));
      got[group.rank()] = logits_after(loaded, tokens);
      group.barrier();
    });
    SCOPED_TRACE(fmt::format("{} ranks", n_ranks));
    expect_close_logits(got[0], want, 2e-2);
    for (int rank = 1; rank < n_ranks; ++rank) EXPECT_EQ(got[rank], got[0]) << rank;
  }
}

// The same GPUs, of which the second half has the second half of the layers.
Placement as_pipeline(Placement p, const ModelConfig& c) {
  Stage first = p.stages[0];
  const auto half = static_cast<int>(first.devices.size()) / 2, middle = c.n_layers / 2;
  Stage second = first;
  first.devices.resize(half);
  second.devices.erase(second.devices.begin(), second.devices.begin() + half);
  first.last = middle - 1;
  second.first = middle;
  first.tp = second.tp = std::min(first.tp, half);
  p.stages = {first, second};
  std::vector<LayerExperts> layers;
  for (const LayerExperts& of : p.layers)
    for (int l = of.first; l <= of.last; ++l) {
      if (!c.is_moe(l)) continue;
      LayerExperts& layer = layers.emplace_back(LayerExperts{l, l, of.groups});
      for (ExpertGroup& group : layer.groups) {
        for (DeviceId& owner : group.owners)
          if (!owner.is_cpu()) owner.gpu = owner.gpu % half + (l < middle ? 0 : half);
        std::sort(group.owners.begin(), group.owners.end());
        group.owners.erase(std::unique(group.owners.begin(), group.owners.end()),
                           group.owners.end());
        if (group.sliced) group.owners = l < middle ? first.devices : second.devices;
      }
    }
  p.layers = layers;
  return p;
}

// Logits of one text that every replica computes, at the same time as others do.
std::vector<Logits> logits_of_replicas(LoadedModel& loaded, const std::vector<int32_t>& tokens) {
  Engine engine(loaded.model(), loaded.cache(), {.size = loaded.config().vocab}, loaded.context(),
                {.keeps_pages = false});
  std::vector<Logits> all(engine.grid().n_replicas + 1);  // and one of them computes it twice
  for (Logits& logits : all) submit_text(engine, tokens, logits);
  while (engine.step()) {
  }
  for (const Scheduler::Counts& counts : engine.counts().replicas)
    EXPECT_GE(counts.n_prompt_tokens, std::ssize(tokens));
  return all;
}

// n_hosts: as the ranks are told.
void expect_logits_of_replicas(int n_ranks, const ModelOptions& options,
                               const std::vector<int32_t>& tokens, const Logits& want, double share,
                               int n_hosts = 1) {
  on_ranks(n_ranks, [&](Group& group) {
    StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
    ModelOptions mine = on_rank(options, group, &steps);
    mine.ranks.on_host.n_of_host = n_ranks / n_hosts;
    LoadedModel loaded(mine);
    if (!steps.leads()) return steps.follow();
    for (const Logits& got : logits_of_replicas(loaded, tokens))
      expect_close_logits(got, want, share);
    steps.end();
  });
}

TEST_P(GpuRanks, ReplicasAndPipelinesHaveTheLogitsOfTheCpu) {
  const LimitedGpuMemory memory(kEnough);
  const std::string directory = kGolden + GetParam();
  const std::vector<int32_t> tokens = golden_text(directory);
  LoadedModel cpu(reference_of(directory));
  const Logits want = logits_after(cpu, tokens);
  std::mt19937 rng(static_cast<unsigned>(std::hash<std::string>()(GetParam())));
  struct Grid {
    int n_ranks, tp;
    bool is_pipeline;
    int micro_batches = 0;
    ExpertDispatch dispatch = ExpertDispatch::kAuto;
  };
  // Every family has one of the grids.
  const std::array grids = {Grid{2, 1, false},
                            Grid{4, 2, false, 3, ExpertDispatch::kAllToAll},
                            Grid{4, 1, true, 2, ExpertDispatch::kLowLatency},
                            Grid{4, 2, true},
                            Grid{2, 1, true},
                            Grid{2, 1, false, 4, ExpertDispatch::kGather}};
  const std::vector<std::string> families = families_without_ties(kGolden);
  const size_t family = std::ranges::find(families, GetParam()) - families.begin();
  const auto& [n_ranks, tp, is_pipeline, micro_batches, dispatch] = grids[family % grids.size()];
  SCOPED_TRACE(fmt::format("{} ranks, tp {}, {}, {} micro-batches, {}", n_ranks, tp, is_pipeline,
                           micro_batches, name_of(dispatch)));
  const bool with_cpu = tp == 1 && micro_batches == 0;
  Placement placement = random_placement_of_ranks(cpu.config(), n_ranks, rng, with_cpu, tp);
  if (is_pipeline) placement = as_pipeline(placement, cpu.config());
  const PlacementFile file(placement);
  ModelOptions options = as_placed(directory, file);
  options.micro_batches = micro_batches;
  options.dispatch = dispatch;
  expect_logits_of_replicas(n_ranks, options, tokens, want, 2e-2);
}

// Rows in FP8, sums in BF16: logits are near those of exact rows on the CPU, in every mode, also of
// a replica on two GPUs, and where a CPU has some experts.
TEST_P(GpuRanks, ReplicasWithRowsInFp8HaveLogitsNearThoseOfTheCpu) {
  const LimitedGpuMemory memory(kEnough);
  const std::string directory = kGolden + GetParam();
  const std::vector<int32_t> tokens = golden_text(directory);
  LoadedModel cpu(reference_of(directory));
  const Logits want = logits_after(cpu, tokens);
  std::mt19937 rng(static_cast<unsigned>(std::hash<std::string>()(GetParam())));
  struct Grid {
    int n_ranks, tp;
    ExpertDispatch dispatch;
    bool with_cpu = false;
  };
  // Every family has one of the grids.
  const std::array grids = {
      Grid{2, 1, ExpertDispatch::kAllToAll},   Grid{2, 1, ExpertDispatch::kGather},
      Grid{2, 1, ExpertDispatch::kLowLatency}, Grid{4, 2, ExpertDispatch::kLowLatency},
      Grid{2, 1, ExpertDispatch::kAuto, true}, Grid{4, 2, ExpertDispatch::kAllToAll}};
  const std::vector<std::string> families = families_without_ties(kGolden);
  const size_t family = std::ranges::find(families, GetParam()) - families.begin();
  const auto& [n_ranks, tp, dispatch, with_cpu] = grids[family % grids.size()];
  SCOPED_TRACE(fmt::format("{} ranks, tp {}, {}", n_ranks, tp, name_of(dispatch)));
  const PlacementFile file(random_placement_of_ranks(cpu.config(), n_ranks, rng, with_cpu, tp));
  ModelOptions options = as_placed(directory, file);
  options.dispatch = dispatch;
  options.rows = ExpertRows::kFp8;
  std::mutex mutex;
  std::string said;
  options.note = [&](const std::string& line) {
    const std::lock_guard lock(mutex);
    if (line.starts_with("rows of experts: ")) said = line;
  };
  const auto joined = [](const Logits& rows) {
    std::vector<float> all;
    for (const std::vector<float>& row : rows) all.insert(all.end(), row.begin(), row.end());
    return all;
  };
  on_ranks(n_ranks, [&](Group& group) {
    StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
    ModelOptions mine = on_rank(options, group, &steps);
    mine.ranks.on_host.n_of_host = n_ranks;
    LoadedModel loaded(mine);
    if (!steps.leads()) return steps.follow();
    EXPECT_TRUE(says(loaded.arithmetic(), ", rows of experts in FP8"));
    for (const Logits& got : logits_of_replicas(loaded, tokens)) {
      const double error = relative_error(joined(got), joined(want), cpu.config().vocab);
      EXPECT_LT(error, kMostErrorOfFp8Rows);
      EXPECT_GT(error, kLeastErrorOfFp8Rows);
    }
    steps.end();
  });
  EXPECT_NE(said.find(", rows in FP8, sums "), std::string::npos) << said;
}

// Experts move between GPUs, also such that several have, in steps that are recorded and not.
TEST_P(GpuRanks, HaveTheLogitsOfTheCpuWhileExpertsMove) {
  const LimitedGpuMemory memory(kEnough);
  const std::string directory = kGolden + GetParam();
  const std::vector<int32_t> tokens = golden_text(directory);
  LoadedModel cpu(reference_of(directory));
  const Logits want = logits_after(cpu, tokens);
  const auto seed = static_cast<unsigned>(std::hash<std::string>()(GetParam()));
  std::mt19937 rng(seed);
  const bool has_replicas = seed % 2 == 0;
  const int n_ranks = has_replicas ? 2 : 3, tp = has_replicas ? 1 : 0;
  const PlacementFile file(random_placement_of_ranks(cpu.config(), n_ranks, rng, false, tp));
  on_ranks(n_ranks, [&](Group& group) {
    StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
    LoadedModel loaded(that_moves(on_rank(as_placed(directory, file), group, &steps)));
    if (!steps.leads()) return steps.follow();
    Engine engine = moving_engine(loaded, {.plan = random_plan(seed)}, 32);
    int64_t n_moved = 0;
    for (int i = 0; i < 2; ++i) {
      std::vector<Logits> all(engine.grid().n_replicas);
      for (Logits& logits : all) submit_text(engine, tokens, logits);
      run_to_end(engine);
      for (const Logits& logits : all) expect_close_logits(logits, want, 2e-2);
      n_moved += move_now(engine);
    }
    EXPECT_GT(n_moved, 0);
    steps.end();
  });
}

// Four replicas on two hosts whose rows cross once to each, exact and in FP8; experts move between
// the GPUs of both.
TEST(GpuRanksOfHosts, SendRowsOnceToEachHost) {
  const LimitedGpuMemory memory(kEnough);
  const std::string directory = kGolden + "v3_fp8";
  std::vector<int32_t> tokens = golden_text(directory);
  while (tokens.size() <= CudaWays::kDecodeTokens) tokens.push_back(tokens[tokens.size() / 3]);
  LoadedModel cpu(reference_of(directory));
  const Logits want = logits_after(cpu, tokens);
  std::mutex mutex;
  std::set<std::string> said;
  // All of a text in one step, which goes the way of prompts, or as many as go the way of decode.
  constexpr int kAll = 64, kFew = 16;
  for (const auto& [rows, max_logits] : {std::pair{ExpertRows::kExact, kAll},
                                         {ExpertRows::kFp8, kAll},
                                         {ExpertRows::kExact, kFew}}) {
    ModelOptions options = {.directory = directory, .device = DeviceChoice::kCuda, .context = 64};
    options.max_logits = max_logits;
    options.n_replicas = 4;
    options.simulated_hosts = {2, 2};
    options.rows = rows;
    options.note = [&](const std::string& line) {
      const std::lock_guard lock(mutex);
      if (line.starts_with("rows of experts: ")) said.insert(line);
    };
    on_ranks(4, [&](Group& group) {
      StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
      LoadedModel loaded(that_moves(on_rank(options, group, &steps)));
      if (!steps.leads()) return steps.follow();
      Engine engine = moving_engine(loaded, {.plan = random_plan(3)}, 32);
      int64_t n_moved = 0;
      for (int i = 0; i < 2; ++i) {
        std::vector<Logits> all(engine.grid().n_replicas);
        for (Logits& logits : all) submit_text(engine, tokens, logits);
        run_to_end(engine);
        for (const Logits& logits : all)
          expect_close_logits(logits, want, rows == ExpertRows::kFp8 ? 0.3 : 2e-2);
        n_moved += move_now(engine);
      }
      EXPECT_GT(n_moved, 0);
      steps.end();
    });
  }
  EXPECT_EQ(said, (std::set<std::string>{
                      "rows of experts: prompts by all-to-all once to each host, decode by "
                      "low-latency once to each host",
                      "rows of experts: prompts by all-to-all once to each host, decode by "
                      "low-latency once to each host, rows in FP8, sums in BF16, those of decode "
                      "as floats"}));
}

INSTANTIATE_TEST_SUITE_P(Families, GpuRanks, testing::ValuesIn(families_without_ties(kGolden)),
                         [](const auto& info_of) { return info_of.param; });

int n_hosts_of(const Placement& p) {
  std::set<int> hosts;
  for (const Stage& stage : p.stages)
    for (const DeviceId d : stage.devices) hosts.insert(d.host);
  return static_cast<int>(hosts.size());
}

// What `tandem plan` places, with the same stages, replicas and division of each, experts on the
// same kinds of devices, the same pace, tables and kind of cache, on as many GPUs as a test has,
// and on as many hosts where those divide the GPUs.
Placement scaled_down(const Placement& planned, const ModelConfig& c, int most_ranks) {
  const auto n_stages = static_cast<int>(planned.stages.size());
  int dp = planned.stages[0].dp(), tp = planned.stages[0].tp;
  while (n_stages * dp * tp > most_ranks) (tp > 2 || dp == 1 ? tp : dp) /= 2;
  const int n_of_stage = dp * tp;
  bool on_cpu = false, on_gpu = false, sliced = false, replicated = false;
  for (const LayerExperts& layer : planned.layers)
    for (const ExpertGroup& group : layer.groups) {
      sliced = sliced || group.sliced;
      replicated = replicated || (!group.sliced && group.owners.size() > 1);
      for (const DeviceId owner : group.owners) (owner.is_cpu() ? on_cpu : on_gpu) = true;
    }
  const int n_ranks = n_stages * n_of_stage;
  const int n_hosts = n_ranks % n_hosts_of(planned) == 0 ? n_hosts_of(planned) : 1;
  const auto device = [&](int rank) {
    const int of_host = n_ranks / n_hosts;
    return DeviceId{rank / of_host, rank % of_host};
  };
  Placement p = backbone_on_gpu(c, kContext);
  p.stages.clear();
  p.head_replicated = planned.head_replicated;
  p.embedding_on_cpu = planned.embedding_on_cpu;
  p.kv_type = planned.kv_type;
  p.micro_batches = planned.micro_batches;
  p.micro_batches_from_sequences = planned.micro_batches_from_sequences;
  p.prefill_chunk_tokens = std::max(1, planned.prefill_chunk_tokens / 128);
  p.stream_from_tokens = planned.stream_from_tokens > 0 ? 4 : 0;
  for (int i = 0; i < n_stages; ++i) {
    Stage& stage = p.stages.emplace_back(
        Stage{c.n_layers * i / n_stages, c.n_layers * (i + 1) / n_stages - 1, {}, tp});
    for (int k = 0; k < n_of_stage; ++k) stage.devices.push_back(device(i * n_of_stage + k));
  }
  for (const Stage& stage : p.stages)
    for (int l = stage.first; l <= stage.last; ++l) {
      if (!c.is_moe(l)) continue;
      std::vector<ExpertGroup> groups;
      if (sliced) {
        groups.push_back({{}, stored_expert_format(c), stage.devices, true});
        for (int e = 0; e < c.router.n_experts; ++e) groups[0].experts.push_back(e);
      }
      for (int e = 0; e < c.router.n_experts && !sliced; ++e) {
        const bool here = on_gpu && (!on_cpu || e % 2 == 0);
        const DeviceId gpu = stage.devices[e % stage.devices.size()];
        groups.push_back({{e}, stored_expert_format(c), {here ? gpu : DeviceId{gpu.host, -1}}});
        if (here && replicated && e % 4 == 0 && stage.devices.size() > 1)
          groups.back().owners.push_back(stage.devices[(e + 1) % stage.devices.size()]);
      }
      p.layers.push_back({l, l, groups});
    }
  return p;
}

// Plans for R1 on the machines that have several GPUs: what is placed there runs.
TEST(GpuRanksOfPlans, HaveTheLogitsOfTheCpu) {
  const LimitedGpuMemory memory(kEnough);
  const Setting gpus("TANDEM_GPU_COUNT", "32");
  const SmallModel model(4, 1024);
  const std::vector<int32_t>& tokens = model.tokens();
  LoadedModel cpu(reference_of(model.directory()));
  const Logits want = logits_after(cpu, tokens);
  std::vector<std::string> names = {"8xh200", "32xh800"};
  if (is_long())
    names = {"8xh200",  "8xh20-96g", "8xh20-141g", "2x8xh20-141g",
             "16xh800", "32xh800",   "12x8xh100",  "home-32x4090"};
  std::map<std::string, int> n_of_grid;
  for (const std::string& name : names)
    for (const int concurrency : {1, 64, 0}) {
      Workload workload;
      workload.concurrency = concurrency;
      if (concurrency != 1) workload.objective = Objective::kThroughput;
      const Planned planned("r1", known_machine(name), workload);
      const Placement placement = planned.plan().placement;
      const int most_ranks = is_long() && name == "32xh800" && concurrency == 0 ? 32 : 8;
      const Placement small = scaled_down(placement, cpu.config(), most_ranks);
      const Stage& stage = small.stages[0];
      const std::string grid =
          fmt::format("dp {} tp {} pp {}, {} micro-batches, {} hosts", stage.dp(), stage.tp,
                      small.stages.size(), small.micro_batches, n_hosts_of(small));
      SCOPED_TRACE(fmt::format("{}, {} sequences: {}", name, concurrency, grid));
      if (n_of_grid[grid]++ > 0) continue;
      const PlacementFile file(small);
      // Few tokens of many ranks: one that makes no progress for 12 s counts as stuck.
      const auto n = most_ranks > 8 ? 3 : std::ssize(tokens);
      expect_logits_of_replicas(static_cast<int>(small.stages.size() * stage.devices.size()),
                                as_placed(model.directory(), file),
                                {tokens.begin(), tokens.begin() + n},
                                {want.begin(), want.begin() + n}, 3e-2, n_hosts_of(small));
    }
  EXPECT_GE(n_of_grid.size(), 3u);
}

// The plan for eight H200: every GPU has some columns of every expert, and reads no others.
TEST(GpuRanksOfSlices, HaveTheLogitsOfTheCpu) {
  const LimitedGpuMemory memory(kEnough);
  const SmallModel model(3, 256);
  const std::string directory = model.directory();
  const std::vector<int32_t>& tokens = model.tokens();
  LoadedModel cpu(reference_of(directory));
  const Logits want = logits_after(cpu, tokens);
  const PlacementFile file(sliced_placement(cpu.config(), 2));
  std::vector<Logits> got(2);
  std::vector<int64_t> read(2);
  on_ranks(2, [&](Group& group) {
    LoadedModel loaded(on_rank(as_placed(directory, file), group));
    got[group.rank()] = logits_after(loaded, tokens);
    read[group.rank()] = loaded.load_report().bytes;
    group.barrier();
  });
  expect_close_logits(got[0], want, 3e-2);
  EXPECT_EQ(got[1], got[0]);
  const ModelConfig& c = cpu.config();
  const int64_t matrix =
      int64_t{2} * c.router.n_experts * c.dim * c.expert_dim * 2;  // all experts'
  for (const int64_t bytes : read)                                 // rows of down are read whole
    EXPECT_LE(bytes, cpu.load_report().bytes - matrix);

  const PlacementFile replicas(sliced_placement(cpu.config(), 2, 1));
  ModelOptions options = as_placed(directory, replicas);
  expect_logits_of_replicas(2, options, tokens, want, 3e-2);
  options.dispatch = ExpertDispatch::kAllToAll;
  EXPECT_TRUE(says(refusal_of_two(options),
                   "--ep-dispatch all-to-all: experts are sliced among all GPUs, so all rows go to "
                   "all ranks"));
  const PlacementFile stages(as_pipeline(sliced_placement(cpu.config(), 4), cpu.config()));
  expect_logits_of_replicas(4, as_placed(directory, stages), tokens, want, 3e-2);
}

}  // namespace
}  // namespace tandem::test
