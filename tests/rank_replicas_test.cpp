// A model whose backbone is on several ranks as replicas with sequences of their own, in every way
// of exchanging rows, and as the stages of a pipeline: golden logits, the embedded model's answers,
// what ranks read, and steps of random batches. Ranks are threads here. rank_pipeline_test has what
// only pipelines do.
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

#include "cli/conversation.h"
#include "cli/options.h"
#include "comm/agreement.h"
#include "comm/local_ranks.h"
#include "engine/completion.h"
#include "io/weight_store.h"
#include "loader/loaded_model.h"
#include "model/checkpoint.h"
#include "model/cost.h"
#include "scheduling/expert_loads.h"
#include "tests/check_close.h"
#include "tests/error_of.h"
#include "tests/golden_file.h"
#include "tests/hybrid_placements.h"
#include "tests/rank_grids.h"
#include "tests/repository.h"
#include "tests/whole_models.h"
#include "text/chat_format.h"

namespace tandem::test {
namespace {

// A request that appends the logits from row `first` on to `rows`, which must outlive it.
EngineRequest scored(const std::vector<int32_t>& prompt, int64_t first, std::vector<float>& rows) {
  EngineRequest request;
  request.request.prompt = prompt;
  request.first_scored = static_cast<int>(first);
  request.on_event = [](const TokenEvent&) { return true; };
  request.on_logits = [&rows](int, std::span<const float> row) {
    rows.insert(rows.end(), row.begin(), row.end());
  };
  return request;
}

using Grid = RankGrid;
constexpr ExpertDispatch kAuto = ExpertDispatch::kAuto, kGather = ExpertDispatch::kGather,
                         kAllToAll = ExpertDispatch::kAllToAll,
                         kLowLatency = ExpertDispatch::kLowLatency;

Engine plain_engine(LoadedModel& loaded, int max_running = 8) {
  return {loaded.model(),
          loaded.cache(),
          {.size = loaded.config().vocab},
          loaded.context(),
          {.max_running = max_running, .keeps_pages = false}};
}

class RankReplicas : public testing::TestWithParam<std::string> {};

// Every replica computes all texts of the goldens, in steps that it shares with others.
TEST_P(RankReplicas, HaveTheGoldenLogits) {
  const std::string directory = kGolden + GetParam();
  const GoldenFile golden(directory + "/golden.safetensors");
  const bool ties = GetParam() == "t1";  // which only float32 decides as the golden values do
  const ModelOptions options = {.directory = directory,
                                .isa = ties ? std::optional(cpu::Isa::kReference) : std::nullopt,
                                .context = 256,
                                .max_logits = 64};
  // Every family has a third of the grids; make test-long computes the others.
  const std::vector<Grid> grids = {{2, 1, kGather},
                                   {3, 1, kAllToAll},
                                   {2, 2, kLowLatency},
                                   {2, 3, kGather},
                                   {1, 2, kAllToAll},
                                   {4, 2, kAllToAll},
                                   {8, 1, kLowLatency},
                                   {1, 1, kAuto, 2},
                                   {1, 1, kAuto, 3},
                                   {1, 2, kAuto, 2},
                                   {2, 1, kLowLatency, 2},
                                   {1, 2, kGather, 3},
                                   {2, 2, kAllToAll, 2},
                                   {2, 1, kGather, 1, 2},
                                   {3, 1, kAllToAll, 1, 4},
                                   {4, 1, kLowLatency, 1, 2},
                                   {2, 2, kGather, 1, 3},
                                   {1, 2, kAllToAll, 1, 2},
                                   {2, 1, kLowLatency, 2, 4},
                                   {4, 1, kAllToAll, 1, 0, {2, 2}},
                                   {2, 2, kAllToAll, 1, 2, {3, 1}},
                                   {4, 1, kAllToAll, 2, 0, {3, 5}},
                                   {8, 1, kAllToAll, 1, 0, {4, 4}},
                                   {1, 4, kAllToAll, 1, 1, {1, 3}},
                                   {4, 1, kAuto, 1, 0, {2, 2}}};
  const std::vector<std::string> families = golden_families(kGolden);
  const size_t family = std::ranges::find(families, GetParam()) - families.begin();
  for (size_t i = 0; i < grids.size(); ++i) {
    if ((i % 3 == family % 3) == is_long()) continue;
    const Grid& grid = grids[i];
    SCOPED_TRACE(grid.name());
    on_grid(grid, options, [&](LoadedModel& loaded) {
      Engine engine = plain_engine(loaded, 64);
      const int64_t vocab = loaded.config().vocab;
      std::vector<std::vector<float>> got, want;
      got.reserve(100);
      for (int copy = 0; copy < grid.dp; ++copy)
        for (const int length : {5, 17, 40}) {
          const std::string suffix = "_" + std::to_string(length);
          if (!golden.has("tokens" + suffix)) continue;
          want.push_back(golden.floats("logits" + suffix));
          const int first = length - static_cast<int>(std::ssize(want.back()) / vocab);
          std::vector<float>& rows = got.emplace_back();
          const auto on_logits = [&rows](int, std::span<const float> row) {
            rows.insert(rows.end(), row.begin(), row.end());
          };
          EngineRequest request;
          request.request.prompt = golden.ints("tokens" + suffix);
          request.first_scored = first;
          request.on_event = [](const TokenEvent&) { return true; };
          request.on_logits = on_logits;
          engine.submit(std::move(request));
        }
      while (engine.step()) {
      }
      ASSERT_FALSE(got.empty());
      for (size_t row = 0; row < got.size(); ++row)
        expect_close(got[row], want[row], (ties ? 2e-4 : 3e-2) * largest(want[row]));
      const EngineCounts counts = engine.counts();
      ASSERT_EQ(std::ssize(counts.replicas), grid.dp > 1 ? grid.dp : 0);
      for (const Scheduler::Counts& of_replica : counts.replicas)
        EXPECT_GT(of_replica.n_prompt_tokens, 0) << "each replica has computed something";
    });
  }
}

// A host for each rank of the grid, with experts of which some are on several ranks of a stage.
Placement with_replicated_experts(const ModelConfig& c, const Grid& grid, std::mt19937& random) {
  Placement p;
  p.backbone = stored_format(c);
  p.embedding_on_cpu = p.head_on_cpu = true;
  p.kv_tokens = 256;
  const int n_of_stage = grid.dp * grid.tp;
  for (int i = 0; i < grid.pp; ++i) {
    Stage& stage = p.stages.emplace_back(
        Stage{c.n_layers * i / grid.pp, c.n_layers * (i + 1) / grid.pp - 1, {}, grid.tp});
    for (int k = 0; k < n_of_stage; ++k) stage.devices.push_back({i * n_of_stage + k, -1});
    for (int l = stage.first; l <= stage.last; ++l) {
      if (!c.is_moe(l)) continue;
      LayerExperts layer = {l, l, {}};
      for (int e = 0; e < c.router.n_experts; ++e) {
        std::vector<DeviceId> owners = stage.devices;
        std::shuffle(owners.begin(), owners.end(), random);
        owners.resize(random() % 3 == 0 ? 1 + random() % owners.size() : 1);
        layer.groups.push_back({{e}, stored_expert_format(c), owners});
      }
      p.layers.push_back(layer);
    }
  }
  return p;
}

TEST_P(RankReplicas, OfExpertsHaveTheGoldenLogits) {
  const std::string directory = kGolden + GetParam();
  const GoldenFile golden(directory + "/golden.safetensors");
  const std::string suffix = golden.has("tokens_17") ? "_17" : "_5";
  const bool ties = GetParam() == "t1";
  const ModelConfig config = ModelConfig::from_directory(directory);
  std::mt19937 random(static_cast<unsigned>(std::hash<std::string>()(GetParam())));
  for (const Grid& grid : {Grid{1, 3, kAuto}, Grid{1, 2, kGather}, Grid{3, 1, kAllToAll},
                           Grid{2, 2, kLowLatency}, Grid{2, 2, kGather, 2}})
    for (const auto choice : {ReplicaChoice::kNearest, ReplicaChoice::kLeastLoaded}) {
      SCOPED_TRACE(fmt::format("{}, {}", grid.name(), name_of(choice)));
      const PlacementFile file(with_replicated_experts(config, grid, random));
      const ModelOptions options = {
          .directory = directory,
          .isa = ties ? std::optional(cpu::Isa::kReference) : std::nullopt,
          .max_logits = 64,
          .placement = file.path(),
          .replica_choice = choice};
      on_grid(grid, options, [&](LoadedModel& loaded) {
        Engine engine = plain_engine(loaded, 64);
        const std::vector<float> want = golden.floats("logits" + suffix);
        std::vector<std::vector<float>> got(grid.dp + 1);
        for (std::vector<float>& rows : got) {
          const std::vector<int32_t> tokens = golden.ints("tokens" + suffix);
          const auto n_scored = std::ssize(want) / loaded.config().vocab;
          engine.submit(scored(tokens, std::ssize(tokens) - n_scored, rows));
        }
        while (engine.step()) {
        }
        for (const std::vector<float>& rows : got)
          expect_close(rows, want, (ties ? 2e-4 : 3e-2) * largest(want));
      });
    }
}

// With one form of attention a row has the same bits, however its step is divided.
TEST_P(RankReplicas, HaveTheSameBitsInMicroBatches) {
  const std::string directory = kGolden + GetParam();
  const GoldenFile golden(directory + "/golden.safetensors");
  const ModelOptions options = {.directory = directory,
                                .context = 256,
                                .max_logits = 64,
                                .attention = AttentionForm::kAbsorbed};
  for (const auto dispatch : {kGather, kAllToAll, kLowLatency}) {
    std::vector<std::vector<float>> whole;
    for (const int n : {1, 2, 4}) {
      const Grid grid{2, 1, dispatch, 1, n};
      SCOPED_TRACE(grid.name());
      std::vector<std::vector<float>> rows(3);  // two of one replica
      on_grid(grid, options, [&](LoadedModel& loaded) {
        Engine engine = plain_engine(loaded, 64);
        for (std::vector<float>& of : rows) {
          engine.submit(
              scored(golden.ints(golden.has("tokens_17") ? "tokens_17" : "tokens_5"), 0, of));
        }
        while (engine.step()) {
        }
      });
      if (n == 1) whole = rows;
      EXPECT_FALSE(rows[2].empty());
      EXPECT_TRUE(rows == whole);
    }
  }
}

// Rows in FP8, sums in BF16: logits are near those of exact rows. A row's bits depend neither on
// the replica that has it, and so on which of its experts are on other ranks, nor on micro-batches.
// Where ranks divide a replica, the one that sends a token adds its experts to its own part of the
// shared expert, so last bits depend on the token's place in the step.
TEST_P(RankReplicas, HaveLogitsNearTheGoldenOnesWithRowsInFp8) {
  if (GetParam() == "t1") GTEST_SKIP() << "scores are equal, and rounded rows decide otherwise";
  const std::string directory = kGolden + GetParam();
  const GoldenFile golden(directory + "/golden.safetensors");
  const std::string suffix = golden.has("tokens_17") ? "_17" : "_5";
  const std::vector<float> want = golden.floats("logits" + suffix);
  ModelOptions options = {.directory = directory,
                          .context = 256,
                          .max_logits = 64,
                          .attention = AttentionForm::kAbsorbed,
                          .rows = ExpertRows::kFp8};
  std::mutex mutex;
  std::string said;
  options.note = [&](const std::string& line) {
    const std::lock_guard lock(mutex);
    if (line.starts_with("rows of experts: ")) said = line;
  };
  for (const auto& [tp, dispatch] :
       {std::pair{1, kGather}, {1, kAllToAll}, {1, kLowLatency}, {2, kAllToAll}, {2, kGather}}) {
    std::vector<float> first;
    for (const int n : {1, 2}) {
      const Grid grid{2, tp, dispatch, 1, n};
      SCOPED_TRACE(grid.name());
      std::vector<std::vector<float>> rows(3);  // two of one replica
      on_grid(grid, options, [&](LoadedModel& loaded) {
        EXPECT_TRUE(says(loaded.arithmetic(), ", rows of experts in FP8"));
        Engine engine = plain_engine(loaded, 64);
        for (std::vector<float>& of : rows) {
          const std::vector<int32_t> tokens = golden.ints("tokens" + suffix);
          const auto n_scored = std::ssize(want) / loaded.config().vocab;
          engine.submit(scored(tokens, std::ssize(tokens) - n_scored, of));
        }
        while (engine.step()) {
        }
      });
      if (first.empty()) first = rows[0];
      for (const std::vector<float>& of : rows) {
        if (tp == 1) {
          EXPECT_TRUE(of == first);
        }
        expect_close_logits({of}, {first}, 1e-5);
      }
    }
    EXPECT_TRUE(said.ends_with(dispatch == kGather ? ", rows in FP8, sums as floats"
                                                   : ", rows in FP8, sums in BF16"))
        << said;
    const double error = relative_error(first, want, ModelConfig::from_directory(directory).vocab);
    EXPECT_LT(error, kMostErrorOfFp8Rows);
    EXPECT_GT(error, kLeastErrorOfFp8Rows) << "rows were not rounded";
  }
}

INSTANTIATE_TEST_SUITE_P(Families, RankReplicas, testing::ValuesIn(golden_families(kGolden)),
                         [](const auto& info_of) { return info_of.param; });

// Questions of every kind of sampling: drawn tokens travel, and rows of logits do for the others.
std::vector<Request> requests_of_all_kinds(const Tokenizer& tokenizer, int n) {
  const ChatFormat format(kTinyR1, tokenizer);
  std::ifstream file(kRoot + "/tests/data/tiny_r1_questions.json");
  const nlohmann::json questions = nlohmann::json::parse(file);
  std::vector<Request> requests;
  for (int i = 0; i < n; ++i) {
    GenerateOptions generate;
    generate.max_new_tokens = 160;
    generate.sampling.temperature = i % 2 == 0 ? 0 : 0.7f;
    generate.sampling.seed = i;
    if (i % 5 == 1) generate.sampling.repetition_penalty = 1.1f;
    if (i % 5 == 2) generate.sampling.n_top_logprobs = 2;
    const auto& q = questions[i % questions.size()];
    requests.push_back(make_request(
        generate, tokenizer, format.prompt(first_messages("", q["question"].get<std::string>()))));
  }
  return requests;
}

// `accepted`: the share of drafts that were, if there were any.
std::vector<std::string> texts_of(LoadedModel& loaded, const Tokenizer& tokenizer,
                                  const std::vector<Request>& requests,
                                  double* accepted = nullptr) {
  Engine engine(loaded.model(), loaded.cache(), vocabulary_of(tokenizer, loaded.config().vocab),
                loaded.context(), {.max_running = 8, .drafting = loaded.drafting()});
  std::vector<std::string> texts;
  for (const Completion& c : complete(engine, requests))
    texts.push_back(tokenizer.decode(c.tokens));
  const Scheduler::Counts counts = engine.counts().scheduler;
  if (accepted && counts.n_drafted_tokens > 0)
    *accepted = static_cast<double>(counts.n_accepted_tokens) /
                static_cast<double>(counts.n_drafted_tokens);
  return texts;
}

TEST(RanksWithReplicas, GiveTheSameAnswers) {
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  // make test-long asks four ranks all 240 questions in every mode, and others some; make test few.
  const std::vector<Request> all = requests_of_all_kinds(tokenizer, 240);
  size_t first = 0;
  struct Case {
    Grid grid;
    DraftChoice draft;
  };
  for (const auto& [grid, draft] :
       {Case{{4, 1, kGather}, DraftChoice::kMtp}, Case{{2, 2, kAllToAll}, DraftChoice::kOff},
        Case{{4, 1, kLowLatency}, DraftChoice::kLookup}, Case{{3, 1, kAuto}, DraftChoice::kAuto},
        Case{{1, 2, kAuto, 2}, DraftChoice::kAuto},
        Case{{2, 1, kLowLatency, 1, 2}, DraftChoice::kOff},
        Case{{3, 1, kGather, 1, 4}, DraftChoice::kMtp},
        Case{{2, 2, kAllToAll, 1, 2}, DraftChoice::kLookup},
        Case{{2, 1, kGather, 2}, DraftChoice::kLookup}}) {
    SCOPED_TRACE(fmt::format("{}, drafts {}", grid.name(), name_of(draft)));
    const bool asks_all = grid.pp == 1 && grid.dp * grid.tp == 4;
    const size_t n_asked = !is_long() ? 16 : asks_all ? all.size() : 30;
    std::vector<Request> requests;
    for (size_t i = 0; i < n_asked; ++i) requests.push_back(all[(first + i) % all.size()]);
    first += n_asked;
    const ModelOptions options = {.directory = kTinyR1,
                                  .context = 1024,
                                  .kv_fraction = 0.5,
                                  .max_kv_tokens = 4096,
                                  .max_logits = 16,
                                  .draft = draft};
    LoadedModel alone(options);
    double accepted_alone = 0, accepted = 0;
    const std::vector<std::string> want = texts_of(alone, tokenizer, requests, &accepted_alone);
    on_grid(grid, options, [&](LoadedModel& loaded) {
      EXPECT_EQ(texts_of(loaded, tokenizer, requests, &accepted), want);
    });
    // Sequences draft from their own hidden states and keys, on every replica.
    if (draft == DraftChoice::kMtp) {
      EXPECT_GT(accepted_alone, 0.05);
      EXPECT_NEAR(accepted, accepted_alone, 0.1 * accepted_alone);
    }
  }
}

// Sequences start and end at random, in replicas that are often idle; nothing waits for ever, no
// page is lost, memory does not grow, and every token is the one that its text alone leads to.
TEST(RanksWithReplicas, ComputeStepsOfRandomBatches) {
  ModelOptions options = {.directory = kGolden + "v3_bf16",
                          .context = 256,
                          .kv_fraction = 0.5,
                          .max_kv_tokens = 640,  // less than the sequences together may need
                          .step_tokens = 48,
                          .max_logits = 24};
  LoadedModel alone(options);
  for (const Grid& grid :
       {Grid{8, 1, kAuto}, Grid{4, 2, kAllToAll}, Grid{2, 2, kGather, 2},
        Grid{4, 1, kLowLatency, 1, 4}, Grid{2, 2, kAllToAll, 1, 2}, Grid{3, 1, kGather, 1, 3}}) {
    SCOPED_TRACE(grid.name());
    const int n_steps = !is_long() ? 66 : grid.dp == 8 ? 10'000 : 500;
    on_grid(grid, options, [&](LoadedModel& loaded) {
      Engine engine(loaded.model(), loaded.cache(), {.size = loaded.config().vocab},
                    loaded.context(), {.max_running = 6});
      int64_t resident_early = 0;
      std::mt19937 random(grid.tp);
      const auto below = [&](int n) { return static_cast<int>(random() % unsigned(n)); };
      int n_running = 0, n_ended = 0, n_computed = 0;
      while (n_computed < n_steps) {
        if (resident_early == 0 && n_computed > n_steps / 10) resident_early = resident_bytes();
        const int n_new = below(3) == 0 ? below(n_running > 40 ? 1 : 7) : 0;
        for (int i = 0; i < n_new; ++i) {
          EngineRequest request;
          for (int k = below(5) == 0 ? below(120) : below(20); k >= 0; --k)
            request.request.prompt.push_back(below(loaded.config().vocab));
          request.request.max_new_tokens = 1 + below(30);
          request.request.sampling.temperature = below(2) == 0 ? 0 : 1;
          request.request.sampling.presence_penalty = below(4) == 0 ? 1 : 0;
          ++n_running;
          request.on_event = [&](const TokenEvent& event) {
            EXPECT_NE(event.finish, FinishReason::kFailed) << event.error;
            if (event.finish) --n_running, ++n_ended;
            return true;
          };
          const SequenceId id = engine.submit(request);
          if (below(10) == 0) {
            engine.abort(id);
            --n_running;
          }
        }
        n_computed += engine.step();
      }
      while (engine.step()) {
      }
      EXPECT_EQ(n_running, 0);
      EXPECT_GT(n_ended, n_steps / 10);
      // Memory that is used for the first time counts too, so few steps say nothing.
      if (!TANDEM_SANITIZED && n_steps >= 10'000) {
        EXPECT_LT(resident_bytes() - resident_early, 4'000'000);
      }
      const Scheduler::Counts counts = engine.counts().scheduler;
      EXPECT_EQ(counts.n_available_pages, counts.n_pages);
    });
  }
}

const ModelOptions kCountedModel = {.directory = kTinyR1,
                                    .isa = cpu::Isa::kReference,
                                    .context = 256,
                                    .max_kv_tokens = 1024,
                                    .step_tokens = 16,
                                    .max_logits = 8};

// The uses of experts by seven requests that share steps.
std::shared_ptr<const ExpertUses> counted_uses(LoadedModel& loaded, int window) {
  Engine engine(loaded.model(), loaded.cache(), {.size = loaded.config().vocab}, loaded.context(),
                {.max_running = 4, .keeps_pages = false, .expert_window = window});
  std::vector<Request> requests(7);
  for (int i = 0; i < 7; ++i) {
    for (int t = 0; t < 3 + 5 * i; ++t) requests[i].prompt.push_back(20 + 7 * t % (60 + i));
    requests[i].max_new_tokens = 2 + i;
    requests[i].sampling.temperature = 0;
  }
  complete(engine, requests);
  return engine.expert_uses();
}

// The first rank of each replica and stage counts its own tokens and layers, each of them once.
TEST(RanksWithReplicas, CountTheUsesOfExpertsTogether) {
  ModelOptions options = kCountedModel;
  const auto& run = counted_uses;
  options.record_routing = true;
  LoadedModel alone(options);
  EXPECT_EQ(run(alone, 0), nullptr);
  const std::vector<std::vector<int64_t>> want = alone.routing()->of_layer;
  options.record_routing = false;
  options.count_experts = true;
  for (const Grid& grid : {Grid{2, 1, kAllToAll}, Grid{1, 2, kAuto}, Grid{1, 1, kAuto, 2},
                           Grid{2, 2, kGather}, Grid{3, 1, kGather}, Grid{1, 2, kAuto, 2}}) {
    SCOPED_TRACE(grid.name());
    on_grid(grid, options, [&](LoadedModel& loaded) {
      const auto uses = run(loaded, 1000);
      EXPECT_EQ(uses->of_layer, want);
      EXPECT_EQ(run(loaded, 1000)->of_layer, want) << "another engine begins with zeros";
      int64_t n_rows = 0;
      for (const auto& layer : want)
        n_rows = std::max(n_rows, std::accumulate(layer.begin(), layer.end(), int64_t{0}));
      EXPECT_EQ(uses->n_tokens * loaded.config().router.n_active, n_rows);
      const ExpertHomes& homes = loaded.expert_homes();
      EXPECT_EQ(homes.n_ranks, grid.dp * grid.tp * grid.pp);
      const ExpertLoads loads = loads_of(*uses, homes);
      EXPECT_GT(loads.balancedness, grid.pp == 1 ? 0.3 : 0.2);
      EXPECT_LT(loads.balancedness, grid.dp * grid.tp == 1 ? 1.001 : 0.999);
    });
  }
}

// --simulate-routing: what ranks and micro-batches choose together is what one process chooses, and
// is as even as its name says.
TEST(RanksWithReplicas, SimulateRouting) {
  ModelOptions options = kCountedModel;
  options.count_experts = true;
  const auto uses_on = [&](const Grid& grid, const char* routing, double* balancedness = nullptr) {
    ModelOptions simulated = options;
    simulated.simulated_routing = simulated_routing(routing);
    std::vector<std::vector<int64_t>> uses;
    on_grid(grid, simulated, [&](LoadedModel& loaded) {
      const auto counted = counted_uses(loaded, 1000);
      uses = counted->of_layer;
      if (balancedness) *balancedness = loads_of(*counted, loaded.expert_homes()).balancedness;
    });
    return uses;
  };
  // A token has 4 of 16 experts: as many on each of 2 or 4 ranks, and in steps of few tokens up to
  // one more on some of three.
  for (const auto& [grid, least] : {std::pair{Grid{2, 1, kAllToAll}, 1.0},
                                    {Grid{1, 2, kAuto}, 1.0},
                                    {Grid{2, 2, kGather}, 1.0},
                                    {Grid{1, 2, kAuto, 2}, 1.0},
                                    {Grid{3, 1, kGather}, 0.8}}) {
    SCOPED_TRACE(grid.name());
    double balancedness = 0;
    uses_on(grid, "balanced-ranks", &balancedness);
    EXPECT_GE(balancedness, least);
  }
  options.simulated_routing = simulated_routing("grouped-random");
  LoadedModel alone(options);
  const auto want = counted_uses(alone, 1000)->of_layer;
  EXPECT_EQ(uses_on({1, 2, kAuto}, "grouped-random"), want);
  EXPECT_EQ(uses_on({2, 1, kGather, 1, 2}, "grouped-random"),
            uses_on({2, 1, kGather, 1, 1}, "grouped-random"));
  // Every step begins with expert 0 and gives each one row more than another at most.
  const auto even = uses_on({2, 1, kGather, 1, 2}, "balanced-experts");
  constexpr int kMostSteps = 50;
  for (const auto& layer : even)
    if (!layer.empty()) {
      const auto [least, most] = std::minmax_element(layer.begin(), layer.end());
      EXPECT_GT(*least, 0);
      EXPECT_LE(*most - *least, kMostSteps);
    }
  options.simulated_routing = simulated_routing("balanced-ranks");
  EXPECT_TRUE(says(error_of([&] { LoadedModel loaded(options); }), "one rank has all experts"));
}

// Every expert is read once, and the backbone once for each replica.
TEST(RanksWithReplicas, ReadOnlyTheirParts) {
  for (const char* family : {"v2_lite", "v3_fp8"})
    for (const int dp : {2, 4}) {
      SCOPED_TRACE(fmt::format("{}, {} replicas", family, dp));
      const ModelOptions options = {.directory = kGolden + family, .context = 64};
      const WeightStore store(options.directory);
      const ModelConfig config = ModelConfig::from_directory(store.directory());
      int64_t want = 0;
      for (const StoredTensor& t : store.tensors()) {
        const std::string name(t.name);
        const bool is_vector =
            name.find("norm") != std::string::npos || name.find("bias") != std::string::npos;
        if (is_passed_over(name, config) || is_vector) continue;
        want += t.bytes * (name.find("mlp.experts.") != std::string::npos ? 1 : dp);
      }
      std::atomic<int64_t> bytes = 0;
      ModelOptions of_ranks = options;
      of_ranks.n_replicas = dp;
      run_local_ranks({dp}, [&](Group& group) {
        StepChannel steps(group, [](const GroupError&) {});
        LoadedModel loaded(on_rank(of_ranks, group, &steps));
        bytes += loaded.load_report().bytes;
        steps.leads() ? steps.end() : steps.follow();
      });
      EXPECT_EQ(bytes, want);
    }
}

// A placement with replicas is obeyed, and one that this program does not run is refused.
std::string refusal(int n_ranks, const ModelOptions& options) {
  std::mutex mutex;
  std::string message;
  run_local_ranks({n_ranks}, [&](Group& group) {
    StepChannel steps(group, [](const GroupError&) {});
    try {
      LoadedModel loaded(on_rank(options, group, &steps));
      steps.leads() ? steps.end() : steps.follow();
    } catch (const AgreedError& error) {
      const std::lock_guard lock(mutex);
      if (error.reported_here) message = error.what();
    }
  });
  return message;
}

std::string placement_file(int tp) {
  std::string file = testing::TempDir() + "replicas.json";
  std::ofstream(file) << fmt::format(
      R"({{"model": "tiny-r1", "machine": "two hosts",
          "backbone": {{"format": "fp8", "stages": [{{"layers": "0-2", "tp": {},
                        "devices": ["host0.cpu", "host1.cpu"]}}]}},
          "embedding": {{"on": "cpu"}}, "head": {{"on": "cpu", "replicated": false}},
          "kv": {{"tokens": 1024, "type": "bf16"}},
          "experts": {{"layers": [{{"layers": "1-2", "groups": [
            {{"experts": "0-14", "format": "fp8", "owners": ["host0.cpu"]}},
            {{"experts": "15", "format": "fp8", "owners": ["host1.cpu"]}}]}}]}},
          "prefill": {{"chunk_tokens": 64, "stream_from_tokens": 0}},
          "micro_batches": 1, "micro_batches_from_sequences": 2}})",
      tp);
  return file;
}

TEST(RanksWithReplicas, ObeyAPlacement) {
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  const std::vector<Request> requests = requests_of_all_kinds(tokenizer, 4);
  LoadedModel alone({.directory = kTinyR1, .context = 512, .max_logits = 8});
  const std::vector<std::string> want = texts_of(alone, tokenizer, requests);
  ModelOptions options = {
      .directory = kTinyR1, .context = 512, .max_logits = 8, .placement = placement_file(1)};
  run_local_ranks({2}, [&](Group& group) {
    StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
    LoadedModel loaded(on_rank(options, group, &steps));
    if (!steps.leads()) return steps.follow();
    EXPECT_EQ(loaded.model().n_replicas(), 2);
    EXPECT_EQ(texts_of(loaded, tokenizer, requests), want);
    steps.end();
  });
}

TEST(RanksWithReplicas, RefuseWhatDoesNotFitTogether) {
  const auto refused = [&](int n_ranks, auto change) {
    ModelOptions options = {.directory = kTinyR1, .context = 64};
    change(options);
    return refusal(n_ranks, options);
  };
  using Options = ModelOptions&;
  EXPECT_EQ(
      refused(3, [](Options o) { o.n_replicas = 2; }),
      "--dp 2 --tp 1 --pp 1: that many replicas, ranks of each and pipeline stages are 2 ranks, "
      "and there are 3: leave one of the numbers out, or start 2 ranks");
  EXPECT_EQ(
      refused(2,
              [](Options o) {
                o.n_replicas = 2;
                o.tp = 2;
              })
          .find(
              "--dp 2 --tp 2 --pp 1: that many replicas, ranks of each and pipeline stages are 4"),
      0u);
  EXPECT_EQ(refused(2, [](Options o) { o.n_stages = 3; })
                .find("--dp 1 --tp 1 --pp 3: that many replicas, ranks of each and pipeline"),
            0u);
  EXPECT_EQ(refused(4, [](Options o) { o.n_stages = 4; }),
            "--pp 4: the model has 3 layers: ask for fewer");
  EXPECT_EQ(refused(2,
                    [](Options o) {
                      o.n_stages = 2;
                      o.draft = DraftChoice::kMtp;
                    })
                .find("--draft mtp: the layers for multi-token prediction follow the last of 2"),
            0u);
  EXPECT_EQ(
      refused(2,
              [](Options o) {
                o.simulated_hosts = {1, 1};
              }),
      "--simulate-hosts 1,1: no rows travel between CPUs, or GPUs, of several ranks: leave it out");
  EXPECT_EQ(refused(2, [](Options o) { o.simulated_rate = 2e9; }),
            "--simulate-rate 2: no rows travel between CPUs of several ranks: leave it out");
  EXPECT_EQ(refused(2,
                    [](Options o) {
                      o.simulated_hosts = {1, 2};
                    }),
            "--simulate-hosts 1,2: there are 2 ranks, of which every host has one or more");
  EXPECT_EQ(refused(2, [](Options o) { o.ep = 4; }),
            "--ep 4: all 2 ranks divide the experts: leave it out");
  const std::string fp8 =
      "--ep-rows fp8: no rows travel between ranks: leave it out, or give replicas of the backbone "
      "(--dp), or gather, all-to-all or low-latency as --ep-dispatch on several ranks";
  EXPECT_EQ(refused(2, [](Options o) { o.rows = ExpertRows::kFp8; }), fp8);
  EXPECT_EQ(error_of([&] {
              LoadedModel({.directory = kTinyR1, .context = 64, .rows = ExpertRows::kFp8});
            }),
            fp8);
  EXPECT_EQ(refused(2, [](Options o) { o.rows = ExpertRows::kExact; }), "") << "as it would be";
  EXPECT_EQ(
      refused(2,
              [](Options o) {
                o.n_replicas = 2;
                o.dispatch = ExpertDispatch::kAllReduce;
              })
          .find("--ep-dispatch all-reduce: 2 replicas of the backbone have tokens of their own"),
      0u);
  EXPECT_EQ(refused(2,
                    [](Options o) {
                      o.n_replicas = 2;
                      o.record_routing = true;
                    })
                .find("--record-routing: a replica of the backbone routes its own tokens only"),
            0u);
  EXPECT_NE(refused(2,
                    [](Options o) {
                      o.n_replicas = 2;
                      o.placement = placement_file(2);
                    })
                .find("has 1 replicas of the backbone: leave --dp out"),
            std::string::npos);
  EXPECT_NE(refused(2,
                    [](Options o) {
                      o.tp = 2;
                      o.placement = placement_file(1);
                    })
                .find("divides the backbone by 1: leave --tp out"),
            std::string::npos);
}

}  // namespace
}  // namespace tandem::test
