// A model on the GPUs of several ranks, which are threads here, with emulated GPUs: logits,
// answers, and what each rank reads.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "comm/agreement.h"
#include "comm/local_ranks.h"
#include "engine/engine.h"
#include "gpu_kernels/collectives.h"
#include "loader/decision.h"
#include "model/checkpoint.h"
#include "model/cost.h"
#include "scheduling/scheduler.h"
#include "tests/check_close.h"
#include "tests/error_of.h"
#include "tests/expert_moves.h"
#include "tests/fake_checkpoint.h"
#include "tests/golden_file.h"
#include "tests/gpu_memory.h"
#include "tests/hybrid_placements.h"
#include "tests/planner_cases.h"
#include "tests/whole_models.h"

namespace tandem::test {
namespace {

// Runs `work` on every rank. What one reports fails the test.
void on_ranks(int n, const std::function<void(Group&)>& work) {
  run_local_ranks({n}, [&](Group& group) {
    try {
      work(group);
    } catch (const AgreedError& error) {
      if (error.reported_here) ADD_FAILURE() << "rank " << group.rank() << ": " << error.what();
    }
  });
}

// What two ranks say that refuse to load a model.
std::string refusal_of_two(const ModelOptions& options) {
  std::array<std::string, 2> said;
  run_local_ranks({2}, [&](Group& group) {
    said[group.rank()] = error_of([&] { LoadedModel{on_rank(options, group)}; });
  });
  return said[0] + said[1];
}

// Divided among all GPUs, or `tp` of them for each replica.
Placement backbone_on_gpus(const ModelConfig& c, int n_ranks, int tp = 0) {
  Placement p = backbone_on_gpu(c, kContext);
  p.stages[0].tp = tp > 0 ? tp : n_ranks;
  p.stages[0].devices.clear();
  for (int rank = 0; rank < n_ranks; ++rank) p.stages[0].devices.push_back({0, rank});
  return p;
}

// All experts in slices on the GPUs of a host.
Placement sliced_placement(const ModelConfig& c, int n_ranks, int tp = 0) {
  Placement p = backbone_on_gpus(c, n_ranks, tp);
  ExpertGroup all = {{}, stored_expert_format(c), p.stages[0].devices, true};
  for (int e = 0; e < c.router.n_experts; ++e) all.experts.push_back(e);
  p.layers.push_back({0, c.n_layers - 1, {all}});
  return p;
}

// Experts on the GPUs of a host and on its CPU, in which some layers have none on one of them. In
// some layers several GPUs have the same experts.
Placement random_placement_of_ranks(const ModelConfig& c, int n_ranks, std::mt19937& rng,
                                    bool with_cpu, int tp = 0) {
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
  return p;
}

// A text that a golden model has logits of.
std::vector<int32_t> golden_text(const std::string& directory) {
  const GoldenFile golden(directory + "/golden.safetensors");
  return golden.ints(golden.has("tokens_17") ? "tokens_17" : "tokens_5");
}

// The model on the CPU, with which GPUs are compared.
ModelOptions reference_of(const std::string& directory) {
  return {.directory = directory,
          .isa = cpu::Isa::kReference,
          .n_threads = 1,
          .context = kContext,
          .max_logits = 40};
}

// The model on GPUs of ranks.
ModelOptions as_placed(const std::string& directory, const PlacementFile& file) {
  return {.directory = directory,
          .device = DeviceChoice::kCuda,
          .max_logits = 40,
          .placement = file.path()};
}

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

void expect_logits_of_replicas(int n_ranks, const ModelOptions& options,
                               const std::vector<int32_t>& tokens, const Logits& want,
                               double share) {
  on_ranks(n_ranks, [&](Group& group) {
    StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
    LoadedModel loaded(on_rank(options, group, &steps));
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

INSTANTIATE_TEST_SUITE_P(Families, GpuRanks, testing::ValuesIn(families_without_ties(kGolden)),
                         [](const auto& info_of) { return info_of.param; });

// What `tandem plan` places, with the same stages, replicas and division of each, and experts on
// the same kinds of devices, on as many GPUs as a test has.
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
  Placement p = backbone_on_gpu(c, kContext);
  p.stages.clear();
  p.head_replicated = planned.head_replicated;
  for (int i = 0; i < n_stages; ++i) {
    Stage& stage = p.stages.emplace_back(
        Stage{c.n_layers * i / n_stages, c.n_layers * (i + 1) / n_stages - 1, {}, tp});
    for (int k = 0; k < n_of_stage; ++k) stage.devices.push_back({0, i * n_of_stage + k});
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
        groups.push_back({{e},
                          stored_expert_format(c),
                          {here ? stage.devices[e % stage.devices.size()] : kCpu}});
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
          fmt::format("dp {} tp {} pp {}", stage.dp(), stage.tp, small.stages.size());
      SCOPED_TRACE(fmt::format("{}, {} sequences: {}", name, concurrency, grid));
      if (n_of_grid[grid]++ > 0) continue;
      const PlacementFile file(small);
      // Few tokens of many ranks: one that makes no progress for 12 s counts as stuck.
      const auto n = most_ranks > 8 ? 3 : std::ssize(tokens);
      expect_logits_of_replicas(static_cast<int>(small.stages.size() * stage.devices.size()),
                                as_placed(model.directory(), file),
                                {tokens.begin(), tokens.begin() + n},
                                {want.begin(), want.begin() + n}, 3e-2);
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

// Answers of rank 0's engine, whose steps the others repeat.
std::vector<std::vector<int32_t>> answers_on_ranks(int n_ranks, const ModelOptions& options,
                                                   int n_questions) {
  std::vector<std::vector<int32_t>> all;
  on_ranks(n_ranks, [&](Group& group) {
    StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
    const ModelOptions mine = on_rank(options, group, &steps);
    if (mine.ranks.follow()) {
      LoadedModel loaded(mine);
      return steps.follow();
    }
    all = answers(mine, n_questions);
    steps.end();
  });
  return all;
}

// Several sequences in chunked prompts and recorded steps, with drafts, streamed experts and a
// cache of either type.
TEST(GpuRanksOfTinyR1, AnswerAsTheCpu) {
  const LimitedGpuMemory memory(kEnough);
  const auto want = answers(tiny_r1(DeviceChoice::kCpu), 3);
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  EXPECT_EQ(answers_on_ranks(2, options, 3), want) << "without a placement";
  ModelOptions replicas = options;
  replicas.n_replicas = 2;
  for (const int n : {0, 2}) {
    replicas.micro_batches = n;
    EXPECT_EQ(answers_on_ranks(2, replicas, 3), want) << "replicas, micro-batches " << n;
  }
  ModelOptions stages = options;
  stages.n_stages = 2;
  stages.draft = DraftChoice::kLookup;
  stages.max_logits = 8;
  EXPECT_EQ(answers_on_ranks(2, stages, 3), want) << "a pipeline without a placement";
  std::mt19937 rng(5);
  const ModelConfig config = ModelConfig::from_directory(options.directory);
  struct Case {
    DraftChoice draft;
    int tp;
  };
  for (const auto& [draft, tp] : {Case{DraftChoice::kOff, 2}, Case{DraftChoice::kMtp, 2},
                                  Case{DraftChoice::kOff, 1}, Case{DraftChoice::kMtp, 1}}) {
    Placement placement = random_placement_of_ranks(config, 2, rng, true, tp);
    placement.kv_tokens = options.context;
    placement.prefill_chunk_tokens = 17;
    placement.stream_from_tokens = draft == DraftChoice::kOff ? 9 : 0;
    const PlacementFile file(placement);
    options.placement = file.path();
    options.draft = draft;
    options.max_logits = 8;
    EXPECT_EQ(answers_on_ranks(2, options, 3), want) << name_of(draft) << ", tp " << tp;
  }
}

struct Swapped {
  std::vector<std::vector<int32_t>> answers;
  Scheduler::Counts counts;
};

// Two sequences for each replica, whose answers begin another page than the prompts: at different
// steps, those of the second replica before those of the first.
Swapped answers_of_two(int n_ranks, const ModelOptions& options) {
  Swapped swapped;
  on_ranks(n_ranks, [&](Group& group) {
    StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
    LoadedModel loaded(on_rank(options, group, &steps));
    if (!steps.leads()) return steps.follow();
    Engine engine(loaded.model(), loaded.cache(), {.size = loaded.config().vocab}, loaded.context(),
                  {.keeps_pages = false, .drafting = loaded.drafting()});
    const int n = 2 * engine.grid().n_replicas;
    swapped.answers.resize(n);
    for (int i = 0; i < n; ++i) {
      EngineRequest r;
      const int n_prompt = kPageSize - (i % 2 == 0 ? 7 : 1) - i % 3;
      for (int t = 0; t < n_prompt; ++t)
        r.request.prompt.push_back((t * t + 7 * i) % loaded.config().vocab);
      r.request.max_new_tokens = 12;
      r.on_event = [&swapped, i](const TokenEvent& event) {
        if (event.token) swapped.answers[i].push_back(*event.token);
        return true;
      };
      engine.submit(std::move(r));
    }
    while (engine.step()) {
    }
    swapped.counts = engine.counts().scheduler;
    steps.end();
  });
  return swapped;
}

// Each replica has pages in the host memory of its ranks, which hold the same sequences. With few
// pages sequences are swapped, and answers are those with many.
void expect_swapped_answers(int dp, int tp, int pp, DraftChoice draft) {
  SCOPED_TRACE(fmt::format("dp {}, tp {}, pp {}", dp, tp, pp));
  const LimitedGpuMemory memory(kEnough);
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  options.step_tokens = 256;
  options.max_logits = 16;
  options.draft_tokens = 2;
  options.n_replicas = dp;
  options.tp = tp;
  options.n_stages = pp;
  options.draft = draft;
  const int n_ranks = dp * tp * pp;
  options.context = int64_t{30} * kPageSize;
  options.max_kv_tokens = 0;
  const Swapped roomy = answers_of_two(n_ranks, options);
  options.context = int64_t{3} * kPageSize;
  options.max_kv_tokens = int64_t{30} * kPageSize;
  const Swapped tight = answers_of_two(n_ranks, options);
  EXPECT_EQ(roomy.counts.n_preemptions, 0);
  EXPECT_EQ(tight.answers, roomy.answers);
  EXPECT_EQ(tight.counts.n_pages, 3 * dp);
  EXPECT_GE(tight.counts.n_swaps_out, dp);
  EXPECT_EQ(tight.counts.n_swaps_in, tight.counts.n_swaps_out);
  EXPECT_EQ(tight.counts.n_free_host_pages, tight.counts.n_host_pages);
}

TEST(GpuRanksOfTinyR1, SwapSequencesToHostMemory) {
  expect_swapped_answers(2, 1, 1, DraftChoice::kMtp);
}

TEST(GpuRanksOfTinyR1, SwapSequencesOfDividedBackbones) {
  expect_swapped_answers(1, 2, 1, DraftChoice::kOff);
  expect_swapped_answers(1, 1, 2, DraftChoice::kOff);
}

// A replica without tokens takes part in each micro-batch of the other's recorded steps.
TEST(GpuRanksOfTinyR1, RecordHowStepsAreDivided) {
  const LimitedGpuMemory memory(kEnough);
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  options.n_replicas = 2;
  options.max_logits = 4;
  options.attention = AttentionForm::kAbsorbed;  // of steps that are recorded
  const std::vector<int32_t> tokens = {5, 80, 300, 41}, rows = {0, 1, 2, 3}, pages = rows;
  struct Step {
    std::vector<int32_t> positions;
    std::vector<Sequence> sequences;
    std::vector<float> logits;  // as a whole step
  };
  std::vector<Step> steps_of;
  for (const std::vector<int>& sizes : {std::vector{1, 1, 1, 1}, {1, 3}, {3, 1}}) {
    Step& step = steps_of.emplace_back();
    for (const int n : sizes) {
      const auto first = static_cast<int32_t>(step.positions.size());
      step.sequences.push_back({first, n, n, std::span(pages).subspan(first, 1)});
      for (int i = 0; i < n; ++i) step.positions.push_back(i);
    }
  }
  on_ranks(2, [&](Group& group) {
    StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
    LoadedModel loaded(on_rank(options, group, &steps));
    StepRunner& model = loaded.model();
    const TensorView logits = model.logits().rows_from(0, 4);
    std::vector<float> got(logits.rows * logits.cols);
    for (const int n : {1, 2, 4, 1, 2, 4, 3})
      for (Step& step : steps_of) {
        const std::array<Batch, 2> batches = {Batch{tokens, step.positions, step.sequences, rows},
                                              Batch{}};
        model.obey_forward(batches, loaded.cache(), n);
        model.device().to_host(logits, {got.data(), logits.rows, logits.cols, logits.cols});
        if (group.rank() > 0) continue;  // it has no tokens
        if (step.logits.empty()) step.logits = got;
        expect_close(got, step.logits, 1e-2 * largest(step.logits));
      }
    group.barrier();
  });
}

// Counted are the router's choices, also of experts whose replica on another rank computes them.
TEST(GpuRanksOfTinyR1, RecordTheRoutingOfOneProcess) {
  const LimitedGpuMemory memory(kEnough);
  ModelOptions options = tiny_r1(DeviceChoice::kCpu);
  options.record_routing = true;
  const std::vector<int32_t> tokens = {5, 80, 300, 41, 7, 99, 150, 23};
  LoadedModel cpu(options);
  logits_after(cpu, tokens);
  const auto want = cpu.routing()->of_layer;
  Placement placement = backbone_on_gpus(cpu.config(), 2);
  placement.kv_tokens = options.context;
  for (int l = 1; l < cpu.config().n_layers; ++l) {
    LayerExperts layer = {l, l, {}};
    for (int e = 0; e < cpu.config().router.n_experts; ++e) {
      std::vector<DeviceId> owners = {{0, e % 2}};
      if (e % 3 == 0) owners.push_back({0, 1 - e % 2});
      layer.groups.push_back({{e}, stored_expert_format(cpu.config()), owners});
    }
    placement.layers.push_back(layer);
  }
  const PlacementFile file(placement);
  options.device = DeviceChoice::kCuda;
  options.placement = file.path();
  on_ranks(2, [&](Group& group) {
    LoadedModel loaded(on_rank(options, group));
    logits_after(loaded, tokens);
    EXPECT_EQ(loaded.routing()->of_layer, want);
    group.barrier();
  });
}

// What a GPU does not hold of a rank's experts is on the CPU, and every expert is read once.
TEST(GpuRanksOfTinyR1, TakeWhatFits) {
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  options.context = 64;
  int64_t alone = 0, whole = 0;
  {
    const LimitedGpuMemory memory(kEnough);
    options.device = DeviceChoice::kCpu;
    alone = LoadedModel(options).load_report().bytes;
    options.device = DeviceChoice::kCuda;
  }
  for (const int64_t bytes : {kEnough, int64_t{2'200'000}}) {
    const LimitedGpuMemory memory(bytes);
    std::vector<int64_t> read(2);
    std::vector<std::string> devices(2);
    on_ranks(2, [&](Group& group) {
      LoadedModel loaded(on_rank(options, group));
      read[group.rank()] = loaded.load_report().bytes;
      devices[group.rank()] = loaded.device();
      group.barrier();
    });
    for (const std::string& device : devices)
      EXPECT_EQ(says(device, "experts also on the cpu"), bytes < kEnough) << device;
    const int64_t sum = read[0] + read[1];
    if (whole == 0) whole = sum;
    EXPECT_EQ(sum, whole) << "wherever experts are";
    EXPECT_LT(read[0], alone);
    EXPECT_GT(sum, alone) << "each rank has embedding, norms and latents";
  }
}

TEST(GpuRanksOfTinyR1, RefuseWaysThatRowsCannotGo) {
  const auto refused = [](int n_replicas, ExpertDispatch dispatch, int64_t memory = kEnough) {
    const LimitedGpuMemory limited(memory);
    ModelOptions options = tiny_r1(DeviceChoice::kCuda);
    options.context = 64;
    options.n_replicas = n_replicas;
    options.dispatch = dispatch;
    return refusal_of_two(options);
  };
  EXPECT_TRUE(says(refused(1, ExpertDispatch::kLowLatency),
                   "--ep-dispatch low-latency: the GPUs of one replica add up their sums by "
                   "all-reduce: leave it out, or use --device cpu"));
  EXPECT_TRUE(says(refused(2, ExpertDispatch::kAllReduce),
                   "--ep-dispatch all-reduce: 2 replicas of the backbone have tokens of their own: "
                   "choose auto, gather, all-to-all or low-latency"));
  EXPECT_TRUE(says(refused(2, ExpertDispatch::kAllToAll, 4'000'000),
                   "--ep-dispatch all-to-all: the CPU has some experts, so all rows go to all "
                   "ranks: leave it out"));
}

// GPUs of two hosts, whose memory they do not share, and ranks that are dealt to them in turns.
TEST(GpuRanksOfTinyR1, RefuseWhatTheirHostsCannotDo) {
  const LimitedGpuMemory memory(kEnough);
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  options.context = 64;
  const ModelConfig config = ModelConfig::from_directory(options.directory);
  const WeightStore store(options.directory);
  ModelWeights stored = stored_weights(store, config);
  const Topology topology = {};
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::Isa::kReference);
  const CpuWeights home(kernels, topology);
  const auto refused = [&](PlacedRank rank, const std::vector<int>& host_of_rank) {
    const Subject subject = {config,  stored, topology, kernels,     home,
                             kEnough, rank,   {},       host_of_rank};
    return error_of([&] { decide(options, subject); });
  };
  options.n_replicas = 2;
  EXPECT_EQ(refused({0, 2, 2}, {0, 0}), "no error");
  options.dispatch = ExpertDispatch::kLowLatency;
  EXPECT_EQ(refused({0, 2, 2}, {0, 0}), "no error");
  EXPECT_EQ(refused({0, 2, 1}, {0, 1}),
            "--ep-dispatch low-latency: the GPUs are on several hosts: choose auto, gather or "
            "all-to-all");
  const PlacementFile file(backbone_on_gpus(config, 4));
  options = as_placed(options.directory, file);
  EXPECT_TRUE(says(refused({0, 4, 2}, {0, 1, 0, 1}),
                   "places parts on the GPUs of hosts, whose ranks do not follow each other: start "
                   "them with --map-by slot instead of --map-by node"));
  EXPECT_FALSE(says(refused({0, 4, 2}, {0, 0, 1, 1}), "--map-by"));
}

TEST(GpuRanksOfTinyR1, NeedAGpuEach) {
  const Setting one("TANDEM_GPU_COUNT", "1");
  const auto device_of = [](DeviceChoice device) {
    std::vector<std::string> said(2);
    run_local_ranks({2}, [&](Group& group) {
      try {
        LoadedModel loaded(on_rank(tiny_r1(device), group));
        said[group.rank()] = loaded.device();
      } catch (const AgreedError& error) {
        if (error.reported_here) said[group.rank()] = error.what();
      }
      group.barrier();
    });
    return said;
  };
  const auto refused = device_of(DeviceChoice::kCuda);
  EXPECT_TRUE(says(refused[0] + refused[1], "rank 1, which is number 1 on its host, needs a GPU"));
  EXPECT_EQ(device_of(DeviceChoice::kAuto), (std::vector<std::string>{"cpu", "cpu"}));
}

// Sums of GPUs, in a recording and without: the order of ranks decides the bits.
TEST(GpuCollectives, AddInTheOrderOfRanks) {
  constexpr int kRanks = 3, kRounds = 5;
  for (const int64_t n : {int64_t{1}, int64_t{8192}, int64_t{20'001}}) {
    std::vector<std::vector<float>> in(kRanks);
    std::mt19937 rng(static_cast<unsigned>(n));
    std::normal_distribution<float> normal;
    for (auto& x : in)
      for (int64_t i = 0; i < n; ++i) x.push_back(normal(rng) * (rng() % 2 ? 1e6f : 1));
    std::vector<float> want = in[0];
    for (int rank = 1; rank < kRanks; ++rank)
      for (int64_t i = 0; i < n; ++i) want[i] += in[rank][i];
    const gpu::Collectives::Id id = gpu::Collectives::make_id();
    on_ranks(kRanks, [&](Group& group) {
      gpu::Stream stream;
      gpu::Collectives ranks(id, group.rank(), kRanks);
      const gpu::Buffer given = gpu::on_gpu(stream, in[group.rank()]);
      gpu::Buffer x = gpu::nans_on_gpu<float>(n);
      const uint64_t before = ranks.progress();
      const auto add = [&] {
        stream.copy(given.as<float>(), given.bytes(), x.as<float>());
        ranks.all_reduce(stream, x.as<float>(), n);
      };
      const gpu::Graph graph = stream.capture(add);
      for (int round = 0; round < kRounds; ++round) {
        round % 2 == 0 ? add() : stream.replay(graph);
        std::vector<float> got(n);
        stream.copy(x.as<float>(), x.bytes(), got.data());
        stream.wait();
        EXPECT_EQ(got, want);
      }
      EXPECT_NE(ranks.progress(), before);
      group.barrier();
    });
  }
}

// What ranks gather, and the sums of their pieces, in a recording and without.
TEST(GpuCollectives, GatherAndScatter) {
  constexpr int kRanks = 3;
  for (const int64_t n : {int64_t{1}, int64_t{8192}, int64_t{20'001}}) {
    std::vector<std::vector<float>> in(kRanks);
    std::mt19937 rng(static_cast<unsigned>(n));
    std::normal_distribution<float> normal;
    for (auto& x : in)
      for (int64_t i = 0; i < kRanks * n; ++i) x.push_back(normal(rng) * (rng() % 2 ? 1e6f : 1));
    std::vector<float> sum = in[0], gathered;
    for (int rank = 0; rank < kRanks; ++rank) {
      for (int64_t i = 0; rank > 0 && i < kRanks * n; ++i) sum[i] += in[rank][i];
      const auto own = in[rank].begin() + rank * n;
      gathered.insert(gathered.end(), own, own + n);
    }
    const gpu::Collectives::Id id = gpu::Collectives::make_id();
    on_ranks(kRanks, [&](Group& group) {
      const int rank = group.rank();
      gpu::Stream stream;
      gpu::Collectives ranks(id, rank, kRanks);
      EXPECT_EQ(ranks.n_ranks(), kRanks);
      const gpu::Buffer given = gpu::on_gpu(stream, in[rank]);
      gpu::Buffer x = gpu::nans_on_gpu<float>(kRanks * n);
      gpu::Buffer y = gpu::nans_on_gpu<float>(kRanks * n);
      const auto exchange = [&] {
        stream.copy(given.as<float>() + rank * n, n * 4, x.as<float>() + rank * n);
        ranks.all_gather(stream, x.as<float>(), n);
        stream.copy(given.as<float>(), given.bytes(), y.as<float>());
        ranks.reduce_scatter(stream, y.as<float>(), n);
      };
      const gpu::Graph graph = stream.capture(exchange);
      for (int round = 0; round < 4; ++round) {
        round % 2 == 0 ? exchange() : stream.replay(graph);
        std::vector<float> got(kRanks * n), sums(kRanks * n);
        stream.copy(x.as<float>(), x.bytes(), got.data());
        stream.copy(y.as<float>(), y.bytes(), sums.data());
        stream.wait();
        EXPECT_EQ(got, gathered);
        for (int64_t i = rank * n; i < (rank + 1) * n; ++i) ASSERT_EQ(sums[i], sum[i]) << i;
      }
      group.barrier();
    });
  }
}

// What each rank sends each other one, of any size, in a recording and without.
TEST(GpuCollectives, SendEachRankItsOwn) {
  constexpr int kRanks = 3;
  std::mt19937 rng(3);
  for (int round = 0; round < 6; ++round) {
    std::array<std::array<int64_t, kRanks>, kRanks> n = {};  // [from, to]
    for (auto& of_rank : n)
      for (int64_t& number : of_rank)
        number = rng() % 3 == 0 ? 0 : static_cast<int64_t>(rng() % (rng() % 2 ? 40 : 30'000));
    if (round == 0) n = {};
    const auto value = [](int from, int to, int64_t i) {
      return static_cast<int32_t>(1'000'000 * from + 100'000 * to + i);
    };
    const gpu::Collectives::Id id = gpu::Collectives::make_id();
    on_ranks(kRanks, [&](Group& group) {
      const int rank = group.rank();
      std::vector<int32_t> sent, want;
      std::vector<int64_t> n_sent, n_received;
      for (int r = 0; r < kRanks; ++r) {
        n_sent.push_back(n[rank][r]);
        n_received.push_back(n[r][rank]);
        for (int64_t i = 0; i < n[rank][r]; ++i) sent.push_back(value(rank, r, i));
        for (int64_t i = 0; i < n[r][rank]; ++i) want.push_back(value(r, rank, i));
      }
      sent.push_back(0);  // memory is never empty
      want.push_back(-1);
      gpu::Stream stream;
      gpu::Collectives ranks(id, rank, kRanks);
      const gpu::Buffer given = gpu::on_gpu(stream, sent);
      const gpu::Buffer got = gpu::nans_on_gpu<int32_t>(std::ssize(want));
      const auto exchange = [&] {
        ranks.all_to_all(stream, {given.as<void>(), n_sent, got.as<void>(), n_received});
      };
      const gpu::Graph graph = stream.capture(exchange);
      const std::vector<int32_t> nothing(want.size(), -1);
      for (int i = 0; i < 3; ++i) {
        i % 2 == 0 ? exchange() : stream.replay(graph);
        EXPECT_EQ(gpu::from_gpu<int32_t>(stream, got), want);
        stream.copy(nothing.data(), got.bytes(), got.as<void>());
        stream.wait();
      }
      group.barrier();
    });
  }
}

}  // namespace
}  // namespace tandem::test
