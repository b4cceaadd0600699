// A model whose backbone is on several ranks as replicas with sequences of their own, in every way
// of exchanging rows: golden logits, the embedded model's answers, what ranks read, and steps of
// random batches. Ranks are threads here.
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
#include "tests/check_close.h"
#include "tests/golden_file.h"
#include "tests/repository.h"
#include "tests/whole_models.h"
#include "text/chat_format.h"

namespace tandem::test {
namespace {

struct Grid {
  int dp, tp;
  ExpertDispatch dispatch;
  std::string name() const { return fmt::format("dp {}, tp {}, {}", dp, tp, name_of(dispatch)); }
};
constexpr ExpertDispatch kAuto = ExpertDispatch::kAuto, kGather = ExpertDispatch::kGather,
                         kAllToAll = ExpertDispatch::kAllToAll,
                         kLowLatency = ExpertDispatch::kLowLatency;

// Runs `lead` on rank 0 with the model on the grid's ranks, which follow its steps.
void on_grid(const Grid& grid, ModelOptions options,
             const std::function<void(LoadedModel&)>& lead) {
  options.n_replicas = grid.dp;
  options.tp = grid.tp;
  options.dispatch = grid.dispatch;
  run_local_ranks({grid.dp * grid.tp}, [&](Group& group) {
    StepChannel steps(group, [](const GroupError& error) { ADD_FAILURE() << error.what(); });
    LoadedModel loaded(on_rank(options, group, &steps));
    if (!steps.leads()) return steps.follow();
    lead(loaded);
    steps.end();
  });
}

Engine engine_of(LoadedModel& loaded, int max_running = 8) {
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
  for (const Grid& grid :
       {Grid{2, 1, kGather}, Grid{3, 1, kAllToAll}, Grid{2, 2, kLowLatency}, Grid{2, 3, kGather},
        Grid{1, 2, kAllToAll}, Grid{4, 2, kAllToAll}, Grid{8, 1, kLowLatency}}) {
    SCOPED_TRACE(grid.name());
    on_grid(grid, options, [&](LoadedModel& loaded) {
      Engine engine = engine_of(loaded, 64);
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
      for (size_t i = 0; i < got.size(); ++i)
        expect_close(got[i], want[i], (ties ? 2e-4 : 3e-2) * largest(want[i]));
      const EngineCounts counts = engine.counts();
      ASSERT_EQ(std::ssize(counts.replicas), grid.dp > 1 ? grid.dp : 0);
      for (const Scheduler::Counts& of_replica : counts.replicas)
        EXPECT_GT(of_replica.n_prompt_tokens, 0) << "each replica has computed something";
    });
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

std::vector<std::string> texts_of(LoadedModel& loaded, const Tokenizer& tokenizer,
                                  const std::vector<Request>& requests) {
  Engine engine(loaded.model(), loaded.cache(), vocabulary_of(tokenizer, loaded.config().vocab),
                loaded.context(), {.max_running = 8, .drafting = loaded.drafting()});
  std::vector<std::string> texts;
  for (const Completion& c : complete(engine, requests))
    texts.push_back(tokenizer.decode(c.tokens));
  return texts;
}

TEST(RanksWithReplicas, GiveTheSameAnswers) {
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  // make test asks a few questions, make test-long all 240 of them.
  const bool all = std::getenv("TANDEM_LONG_TEST") != nullptr;
  const std::vector<Request> requests = requests_of_all_kinds(tokenizer, all ? 240 : 24);
  struct Case {
    Grid grid;
    DraftChoice draft;
  };
  for (const auto& [grid, draft] :
       {Case{{4, 1, kGather}, DraftChoice::kMtp}, Case{{2, 2, kAllToAll}, DraftChoice::kOff},
        Case{{4, 1, kLowLatency}, DraftChoice::kLookup}, Case{{3, 1, kAuto}, DraftChoice::kAuto}}) {
    SCOPED_TRACE(fmt::format("{}, drafts {}", grid.name(), name_of(draft)));
    const ModelOptions options = {.directory = kTinyR1,
                                  .context = 1024,
                                  .kv_fraction = 0.5,
                                  .max_kv_tokens = 4096,
                                  .max_logits = 16,
                                  .draft = draft};
    LoadedModel alone(options);
    const std::vector<std::string> want = texts_of(alone, tokenizer, requests);
    on_grid(grid, options,
            [&](LoadedModel& loaded) { EXPECT_EQ(texts_of(loaded, tokenizer, requests), want); });
  }
}

// Sequences start and end at random, in replicas that are often idle; nothing waits for ever, no
// page is lost, and every token is the one that its text alone leads to.
TEST(RanksWithReplicas, ComputeStepsOfRandomBatches) {
  const bool is_long = std::getenv("TANDEM_LONG_TEST") != nullptr;
  const int n_steps = is_long ? 10'000 : 200;
  ModelOptions options = {.directory = kGolden + "v3_bf16",
                          .context = 256,
                          .kv_fraction = 0.5,
                          .max_kv_tokens = 640,  // less than the sequences together may need
                          .step_tokens = 48,
                          .max_logits = 24};
  LoadedModel alone(options);
  for (const Grid& grid : {Grid{8, 1, kAuto}, Grid{4, 2, kAllToAll}, Grid{8, 1, kGather}}) {
    SCOPED_TRACE(grid.name());
    on_grid(grid, options, [&](LoadedModel& loaded) {
      Engine engine(loaded.model(), loaded.cache(), {.size = loaded.config().vocab},
                    loaded.context(), {.max_running = 6});
      std::mt19937 random(grid.tp);
      const auto below = [&](int n) { return static_cast<int>(random() % unsigned(n)); };
      int n_running = 0, n_ended = 0, n_computed = 0;
      while (n_computed < n_steps / 3) {
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
      EXPECT_GT(n_ended, n_steps / 30);
      const Scheduler::Counts counts = engine.counts().scheduler;
      EXPECT_EQ(counts.n_available_pages, counts.n_pages);
    });
  }
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

std::string placement_file(int tp, const char* head) {
  const std::string file = testing::TempDir() + "replicas.json";
  std::ofstream(file) << fmt::format(
      R"({{"model": "tiny-r1", "machine": "two hosts",
          "backbone": {{"format": "fp8", "stages": [{{"layers": "0-2", "tp": {},
                        "devices": ["host0.cpu", "host1.cpu"]}}]}},
          "embedding": {{"on": "cpu"}}, "head": {{"on": "cpu", "replicated": {}}},
          "kv": {{"tokens": 1024, "type": "bf16"}},
          "experts": {{"layers": [{{"layers": "1-2", "groups": [
            {{"experts": "0-14", "format": "fp8", "owners": ["host0.cpu"]}},
            {{"experts": "15", "format": "fp8", "owners": ["host1.cpu"]}}]}}]}},
          "prefill": {{"chunk_tokens": 64, "stream_from_tokens": 0}},
          "micro_batches": 1, "micro_batches_from_sequences": 2}})",
      tp, head);
  return file;
}

TEST(RanksWithReplicas, ObeyAPlacement) {
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  const std::vector<Request> requests = requests_of_all_kinds(tokenizer, 4);
  LoadedModel alone({.directory = kTinyR1, .context = 512, .max_logits = 8});
  const std::vector<std::string> want = texts_of(alone, tokenizer, requests);
  ModelOptions options = {.directory = kTinyR1,
                          .context = 512,
                          .max_logits = 8,
                          .placement = placement_file(1, "true")};
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
  const ModelOptions usual = {.directory = kTinyR1, .context = 64};
  const auto refused = [&](int n_ranks, auto change) {
    ModelOptions options = usual;
    change(options);
    return refusal(n_ranks, options);
  };
  using Options = ModelOptions&;
  EXPECT_EQ(
      refused(3, [](Options o) { o.n_replicas = 2; }),
      "--dp 2 --tp 1: replicas of the backbone with so many ranks each are 2 ranks, and there "
      "are 3: leave one of the numbers out, or start 2 ranks");
  EXPECT_EQ(
      refused(2,
              [](Options o) {
                o.n_replicas = 2;
                o.tp = 2;
              })
          .find("--dp 2 --tp 2: replicas of the backbone with so many ranks each are 4 ranks"),
      0u);
  EXPECT_EQ(refused(2, [](Options o) { o.ep = 4; }),
            "--ep 4: all 2 ranks divide the experts: leave it out");
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
                      o.placement = placement_file(2, "true");
                    })
                .find("has 1 replicas of the backbone: leave --dp out"),
            std::string::npos);
  EXPECT_NE(refused(2,
                    [](Options o) {
                      o.tp = 2;
                      o.placement = placement_file(1, "true");
                    })
                .find("divides the backbone by 1: leave --tp out"),
            std::string::npos);
  EXPECT_NE(refused(2, [](Options o) { o.placement = placement_file(1, "false"); })
                .find("2 replicas of the backbone share one head"),
            std::string::npos);
}

}  // namespace
}  // namespace tandem::test
