// What only pipelines of ranks do: prompts in pieces, decode steps in flight, stages that read
// their layers. Ranks are threads here.
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "engine/engine.h"
#include "engine/step_arrays.h"
#include "loader/loaded_model.h"
#include "tests/check_close.h"
#include "tests/golden_file.h"
#include "tests/rank_grids.h"
#include "tests/repository.h"
#include "tests/whole_models.h"
#include "text/tokenizer.h"

namespace tandem::test {
namespace {

Engine engine_of(LoadedModel& loaded, int max_running = 8) {
  return {loaded.model(),
          loaded.cache(),
          {.size = loaded.config().vocab},
          loaded.context(),
          {.max_running = max_running}};
}

// A prompt passes through the stages of a pipeline in pieces, with logits of any of its rows.
TEST(RanksInAPipeline, ComputePromptsInPieces) {
  const ModelOptions options = {
      .directory = kGolden + "v3_bf16", .context = 1024, .max_logits = 512};
  std::vector<std::vector<int32_t>> prompts;
  std::mt19937 random(3);
  for (const int n : {300, 70, 129}) {
    std::vector<int32_t>& prompt = prompts.emplace_back();
    for (int i = 0; i < n; ++i) prompt.push_back(static_cast<int32_t>(random() % 100));
  }
  // The last rows of each, of sequences that a step computes together.
  const auto logits_of = [&](LoadedModel& loaded) {
    Engine engine = engine_of(loaded);
    std::vector<std::vector<float>> rows(prompts.size());
    for (size_t i = 0; i < prompts.size(); ++i) {
      EngineRequest request;
      request.request.prompt = prompts[i];
      request.first_scored = i == 0 ? 290 : 60;
      request.on_event = [](const TokenEvent&) { return true; };
      request.on_logits = [&rows, i](int, std::span<const float> row) {
        rows[i].insert(rows[i].end(), row.begin(), row.end());
      };
      engine.submit(std::move(request));
    }
    while (engine.step()) {
    }
    EXPECT_EQ(engine.counts().n_steps, 1);
    return rows;
  };
  LoadedModel alone(options);
  const auto want = logits_of(alone);
  for (const RankGrid& grid :
       {RankGrid{1, 1, ExpertDispatch::kAuto, 2}, RankGrid{1, 2, ExpertDispatch::kAuto, 3},
        RankGrid{2, 1, ExpertDispatch::kGather, 2}}) {
    SCOPED_TRACE(grid.name());
    on_grid(grid, options, [&](LoadedModel& loaded) {
      const auto got = logits_of(loaded);
      for (size_t i = 0; i < want.size(); ++i)
        expect_close(got[i], want[i], 2e-2 * largest(want[i]));
    });
  }
}

// A stage reads its layers, the first one the embedding and the last one the head.
TEST(RanksInAPipeline, ReadOnlyTheirLayers) {
  for (const char* family : {"v2_lite", "v3_fp8", "moonlight_tied"}) {
    SCOPED_TRACE(family);
    ModelOptions options = {.directory = kGolden + family, .context = 64};
    LoadedModel alone(options);
    const int64_t embedding = int64_t{alone.config().vocab} * alone.config().dim * 2;
    options.n_stages = 3;
    std::vector<int64_t> bytes(3);
    run_local_ranks({3}, [&](Group& group) {
      StepChannel steps(group, [](const GroupError&) {});
      LoadedModel loaded(on_rank(options, group, &steps));
      bytes[group.rank()] = loaded.load_report().bytes;
      EXPECT_LT(loaded.cache().page_bytes(), alone.cache().page_bytes() / 2);
      steps.leads() ? steps.end() : steps.follow();
    });
    const int64_t twice = alone.config().tied_head ? embedding : 0;
    EXPECT_EQ(bytes[0] + bytes[1] + bytes[2], alone.load_report().bytes + twice);
    for (const int64_t of_stage : bytes) EXPECT_GT(of_stage, 0);
  }
}

// StaggeredAnswers to random prompts, some of which come later, and a part of which is aborted, so
// that sequences begin, end and are cut off while steps are in flight.
struct StaggeredAnswers {
  std::map<int, std::vector<int32_t>> tokens;  // of requests that are not aborted
  EngineCounts counts;
};

bool is_aborted(int request) { return request % 7 == 3; }

StaggeredAnswers answers_of(LoadedModel& loaded, const Tokenizer& tokenizer,
                            const std::vector<Request>& requests) {
  Engine engine(loaded.model(), loaded.cache(), vocabulary_of(tokenizer, loaded.config().vocab),
                loaded.context(), {.max_running = 6, .drafting = loaded.drafting()});
  StaggeredAnswers answers;
  std::map<int, SequenceId> running;
  std::mt19937 random(5), random_aborts(6);
  for (int n_asked = 0; n_asked < std::ssize(requests) || !running.empty();) {
    if (n_asked < std::ssize(requests) && random() % 3 == 0) {
      const int number = n_asked++;
      EngineRequest request{.request = requests[number]};
      request.on_event = [&answers, &running, number](const TokenEvent& event) {
        if (event.token && !is_aborted(number)) answers.tokens[number].push_back(*event.token);
        if (event.finish) running.erase(number);
        EXPECT_TRUE(event.error.empty()) << event.error;
        return true;
      };
      running[number] = engine.submit(std::move(request));
    }
    for (auto it = running.begin(); it != running.end();) {
      const auto entry = it++;
      if (!is_aborted(entry->first) || random_aborts() % 8 > 0) continue;
      engine.abort(entry->second);
      running.erase(entry);
    }
    engine.step();
  }
  while (engine.step()) {
  }
  answers.counts = engine.counts();
  return answers;
}

// Shares of the sequences are computed by different stages at the same time, and tokens are those
// of one process, also where pages are few and sequences are preempted.
TEST(RanksInAPipeline, DecodeInFlight) {
  const Tokenizer tokenizer = Tokenizer::from_directory(kTinyR1);
  std::vector<Request> requests = questions(kTinyR1, tokenizer, is_long() ? 200 : 30);
  for (size_t i = 0; i < requests.size(); ++i)
    requests[i].max_new_tokens = 1 + static_cast<int>(i * 37 % 60);
  for (const int64_t kv_tokens : {4096, 384}) {
    const ModelOptions options = {.directory = kTinyR1,
                                  .context = 128,
                                  .kv_fraction = 0.5,
                                  .max_kv_tokens = kv_tokens,
                                  .max_logits = 8,
                                  .draft = DraftChoice::kLookup};
    LoadedModel alone(options);
    const StaggeredAnswers want = answers_of(alone, tokenizer, requests);
    for (const RankGrid& grid :
         {RankGrid{1, 1, ExpertDispatch::kAuto, 2}, RankGrid{1, 2, ExpertDispatch::kAuto, 2},
          RankGrid{2, 1, ExpertDispatch::kAllToAll, 2}, RankGrid{1, 1, ExpertDispatch::kAuto, 3}}) {
      SCOPED_TRACE(fmt::format("{}, {} tokens of cache", grid.name(), kv_tokens));
      on_grid(grid, options, [&](LoadedModel& loaded) {
        const StaggeredAnswers got = answers_of(loaded, tokenizer, requests);
        EXPECT_EQ(got.tokens, want.tokens);
        const Scheduler::Counts& counts = got.counts.scheduler;
        EXPECT_TRUE(grid.dp > 1 || got.counts.n_steps > want.counts.n_steps * 5 / 4) << "shares";
        EXPECT_EQ(counts.n_running + counts.n_waiting, 0);
        EXPECT_EQ(counts.n_available_pages, counts.n_pages) << "pages are lost";
      });
    }
  }
}

// Each stage computes a share of the sequences in a step; one sequence alone passes as before.
TEST(RanksInAPipeline, ShareTheSequencesOfDecodeSteps) {
  const ModelOptions options = {.directory = kTinyR1,
                                .context = 128,
                                .kv_fraction = 0.5,
                                .max_kv_tokens = 1024,
                                .max_logits = 8,
                                .draft = DraftChoice::kOff};
  const auto steps_of = [&](LoadedModel& loaded, int n_sequences) {
    Engine engine = engine_of(loaded);
    for (int i = 0; i < n_sequences; ++i) {
      EngineRequest request;
      request.request.prompt = {1 + i, 2, 3};
      request.request.max_new_tokens = 51;
      request.on_event = [](const TokenEvent&) { return true; };
      engine.submit(std::move(request));
    }
    int n_calls = 0;  // of stages, also of those that have nothing to compute
    while (engine.step()) ++n_calls;
    return std::pair(engine.counts(), n_calls);
  };
  on_grid({1, 1, ExpertDispatch::kAuto, 3}, options, [&](LoadedModel& loaded) {
    const auto [one, n_calls_of_one] = steps_of(loaded, 1);
    EXPECT_EQ(one.n_steps, 51);
    EXPECT_EQ(one.steps_of[0], 50);
    EXPECT_EQ(n_calls_of_one, 51) << "one sequence is not divided";
    const auto [six, n_calls_of_six] = steps_of(loaded, 6);
    EXPECT_EQ(six.n_steps, 1 + 3 * 50);
    EXPECT_EQ(six.steps_of[1], 3 * 50) << "two of six sequences each";
    EXPECT_EQ(n_calls_of_six, 1 + 3 * 50 + 2)
        << "a stage's calls, and those of the stages after it";
  });
}

// After a step that failed others may be on their way. A whole step forgets them: they would write
// keys where its own are.
TEST(RanksInAPipeline, ForgetWhatIsInFlightBeforeAWholeStep) {
  const ModelOptions options = {.directory = kGolden + "v3_bf16", .context = 64, .max_logits = 8};
  const std::vector<int32_t> lost = {90, 80, 70, 60, 50}, prompt = {10, 20, 30, 40, 50}, page = {0};
  const auto logits_of = [&](LoadedModel& loaded, bool loses) {
    StepRunner& model = loaded.model();
    const int vocab = loaded.config().vocab;
    const std::vector<uint32_t> allowed((vocab + 31) / 32, ~0u);
    model.set_vocabulary({allowed, vocab});
    StepArrays step(8);
    const auto compute = [&](const std::vector<int32_t>& tokens, int first, int n, bool flies) {
      step.clear();
      if (n > 0) step.add(tokens, page, first, n, 1);
      const Batch batch = step.batch();
      if (flies)
        model.forward_in_flight(std::span(&batch, 1), loaded.cache());
      else
        model.forward(batch, loaded.cache());
    };
    if (loses) compute(lost, 0, 3, true);
    compute(prompt, 0, 4, false);
    compute(prompt, 4, 1, true);
    compute({}, 0, 0, true);
    std::vector<float> logits(vocab);
    const std::vector<int32_t> rows = {0};
    const LogitsWanted wanted = {.copied = rows};
    model.read_logits(std::span(&wanted, 1), {}, {logits.data(), 1, vocab, vocab, DType::kF32});
    return logits;
  };
  std::vector<float> want, got;
  for (const bool loses : {false, true})
    on_grid({1, 1, ExpertDispatch::kAuto, 2}, options,
            [&](LoadedModel& loaded) { (loses ? got : want) = logits_of(loaded, loses); });
  EXPECT_GT(largest(want), 0);
  EXPECT_EQ(got, want);
}

}  // namespace
}  // namespace tandem::test
