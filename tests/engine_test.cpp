// The engine's loop with the embedded model: the same text alone, in a batch, after preemption,
// with a cached prefix and with either way of output; stop strings, aborts, deadlines, failures.
#include "engine/engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <utility>

#include "cli/conversation.h"
#include "cli/options.h"
#include "scheduling/answer_stream.h"
#include "tests/error_of.h"
#include "tests/plain_engine.h"
#include "tests/repository.h"
#include "tests/running_engine.h"
#include "text/chat_format.h"
#include "text/grammar/schema_grammar.h"

namespace tandem::test {
namespace {

// A batch of long prompts with a common prefix and short prompts, greedy and sampled.
std::vector<Asked> crowd() {
  std::vector<Asked> requests;
  std::string long_text = "Tell me. ";
  for (int i = 0; i < 40; ++i) long_text += fmt::format("What is {} + {}? ", i * 7, 1000 - i);
  for (int i = 0; i < 24; ++i) {
    const std::string ask = fmt::format("What is {} + {}?", 100 + 37 * i, 911 - 13 * i);
    requests.push_back(question(i % 3 == 0 ? long_text + ask : ask, i % 2 == 0 ? 0.0f : 1.5f,
                                static_cast<uint64_t>(i)));
    if (i % 4 != 1) continue;
    requests.back().request.stop_ids.clear();  // some answers are long, so that the cache fills
    requests.back().request.max_new_tokens = 300;
  }
  return requests;
}

// A request whose answer, after thinking, is a list of two or three numbers.
Asked list_question(int i) {
  static const TokenTrie trie(tokenizer());
  static const auto tokens = [] {
    Grammar grammar;
    const JsonRules json(grammar);
    grammar.finish(add_schema(
        grammar, json,
        {{"type", "array"}, {"items", {{"type", "integer"}}}, {"minItems", 2}, {"maxItems", 3}}));
    return std::make_shared<GrammarTokens>(std::move(grammar), trie);
  }();
  Asked request = question(fmt::format("What is {} + {}?", 3 * i, 100 - i),
                           i % 2 == 0 ? 0.0f : 1.0f, static_cast<uint64_t>(i));
  request.request.max_new_tokens = 600;
  request.constraint = std::make_shared<TokenConstraint>(
      tokens, tokenizer(),
      TokenConstraint::Options{.after_thinking = true,
                               .end_tokens = request.request.stop_ids,
                               .vocabulary = tokenizer().vocab_size()});
  return request;
}

TEST(Engine, ConstrainedAnswersFitTheGrammarInAnyBatch) {
  std::vector<std::vector<std::string>> all;
  for (const bool async : {true, false}) {
    for (const bool crowded : {true, false}) {
      RunningEngine engine({.async_output = async});
      std::vector<std::future<Ending>> others, lists;
      for (int i = 0; crowded && i < 12; ++i)
        others.push_back(engine.submit(question(fmt::format("What is {} + 5?", i), 1.0f, i)));
      for (int i = 0; i < 10; ++i) {
        lists.push_back(engine.submit(list_question(i)));
        if (!crowded) lists.back().wait();
      }
      std::vector<std::string> texts;
      for (auto& list : lists) {
        const Ending ending = list.get();
        EXPECT_EQ(ending.finish, FinishReason::kStop) << ending.error;
        texts.push_back(ending.text);
      }
      all.push_back(texts);
    }
  }
  for (const std::string& text : all[0]) {
    const size_t mark = text.find("</think>");
    ASSERT_NE(mark, std::string::npos) << text;
    EXPECT_GT(mark, 20u) << "it thinks before";
    const auto list = nlohmann::json::parse(text.substr(mark + 8), nullptr, false);
    ASSERT_TRUE(list.is_array()) << text;
    EXPECT_TRUE(list.size() == 2 || list.size() == 3) << text;
  }
  for (const auto& texts : all) EXPECT_EQ(texts, all[0]);
}

TEST(Engine, ATokenThatCannotComeFailsOnlyItsAnswer) {
  RunningEngine engine({});
  Asked request = list_question(0);
  request.request.prompt = {5};
  Grammar grammar;
  const Grammar::Rule rule = grammar.add_rule();
  grammar.add_token(grammar.start(rule), tokenizer().vocab_size() + 5, grammar.end(rule));
  grammar.finish(rule);
  const TokenTrie trie(tokenizer());
  request.constraint = std::make_shared<TokenConstraint>(
      std::make_shared<GrammarTokens>(std::move(grammar), trie), tokenizer(),
      TokenConstraint::Options{
          .after_thinking = false, .end_tokens = {}, .vocabulary = tokenizer().vocab_size() + 64});
  const Ending ending = engine.submit(std::move(request)).get();
  EXPECT_EQ(ending.finish, FinishReason::kFailed);
  EXPECT_TRUE(says(ending.error, "allow no token of the vocabulary")) << ending.error;
}

std::vector<std::string> texts_of(RunningEngine& engine, bool one_by_one) {
  std::vector<std::string> texts;
  std::vector<std::future<Ending>> endings;
  for (Asked& request : crowd()) {
    endings.push_back(engine.submit(std::move(request)));
    if (one_by_one) endings.back().wait();
  }
  for (auto& ending : endings) texts.push_back(ending.get().text);
  return texts;
}

TEST(Engine, SameTextInAnyBatch) {
  RunningEngine plain({.keeps_pages = false});
  const auto alone = texts_of(plain, true);
  EXPECT_NE(alone[2].find("</think>"), std::string::npos) << alone[2];
  EXPECT_EQ(texts_of(plain, false), alone) << "in a crowd";

  RunningEngine synchronous({.async_output = false, .keeps_pages = false});
  EXPECT_EQ(texts_of(synchronous, false), alone) << "without output thread";

  RunningEngine caching({});
  EXPECT_EQ(texts_of(caching, true), alone) << "first time";
  EXPECT_EQ(texts_of(caching, false), alone) << "with prefixes from the cache";
  EXPECT_GT(caching->counts().scheduler.n_cached_tokens, 1000);

  for (const bool keeps : {false, true}) {
    RunningEngine tight({.kv_tokens = 1152,
                         .step_tokens = 64,
                         .max_running = 24,
                         .keeps_pages = keeps,
                         .context = 1152});
    EXPECT_EQ(texts_of(tight, false), alone) << "with few pages";
    EXPECT_GT(tight->counts().scheduler.n_preemptions, 0);
  }
}

// Requests whose tokens depend on more than the last row of logits.
std::vector<Asked> demanding_questions() {
  std::vector<Asked> requests;
  for (int i = 0; i < 12; ++i) {
    Asked r =
        question(fmt::format("What is {} + {}?", 478 + i, 356 - i), i % 2 == 0 ? 0.0f : 2.0f, i);
    SamplingParams& s = r.request.sampling;
    if (i < 2) s.repetition_penalty = 1.3f;
    if (i == 2 || i == 3) s.presence_penalty = 1.5f;
    if (i == 4 || i == 5) s.frequency_penalty = 0.7f;
    if (i == 6 || i == 7) s.n_top_logprobs = 3;
    if (i == 8 || i == 9) s.logit_bias = {{22, 2.0f}, {25, -3.0f}};
    if (i == 10) {
      s.min_new_tokens = 90;
      s.held_back = r.request.stop_ids;
    }
    if (i == 11) r.answer.stops = {"hundreds"};
    requests.push_back(std::move(r));
    requests.push_back(list_question(i));
  }
  return requests;
}

TEST(Engine, DraftsChangeNoAnswer) {
  const auto endings_of = [](RunningEngine& engine) {
    std::vector<std::future<Ending>> futures;
    for (Asked& request : demanding_questions())
      futures.push_back(engine.submit(std::move(request)));
    std::vector<Ending> endings;
    for (auto& future : futures) endings.push_back(future.get());
    return endings;
  };
  RunningEngine plain({});
  const std::vector<Ending> expected = endings_of(plain);
  const auto texts = texts_of(plain, true);
  EXPECT_EQ(plain->counts().scheduler.n_drafted_tokens, 0);
  const RunningEngine::Options all[] = {
      {.draft_tokens = 4},
      {.async_output = false, .keeps_pages = false, .draft_tokens = 8},
      {.kv_tokens = 1152, .step_tokens = 64, .max_running = 24, .context = 1152, .draft_tokens = 4},
      {.draft_tokens = 1, .draft = DraftChoice::kMtp},
      {.async_output = false, .keeps_pages = false, .draft_tokens = 4, .draft = DraftChoice::kMtp},
      {.kv_tokens = 1152,
       .step_tokens = 64,
       .max_running = 24,
       .context = 1152,
       .draft_tokens = 2,
       .draft = DraftChoice::kMtp},
      {.draft_tokens = 4, .draft = DraftChoice::kAuto}};
  for (const RunningEngine::Options& options : all) {
    SCOPED_TRACE(fmt::format("{} {}", name_of(options.draft), options.draft_tokens));
    RunningEngine drafting(options);
    const std::vector<Ending> endings = endings_of(drafting);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(endings[i].tokens, expected[i].tokens) << i;
      EXPECT_EQ(endings[i].text, expected[i].text) << i;
      EXPECT_EQ(endings[i].logprobs, expected[i].logprobs) << i;
      EXPECT_EQ(endings[i].finish, expected[i].finish) << i;
    }
    EXPECT_EQ(texts_of(drafting, false), texts);
    const Scheduler::Counts counts = drafting->counts().scheduler;
    if (options.draft == DraftChoice::kAuto) continue;  // what pays depends on the machine
    EXPECT_GT(counts.n_accepted_tokens, 300);
    EXPECT_GT(counts.n_drafted_tokens, counts.n_accepted_tokens);
    if (options.draft == DraftChoice::kMtp && options.draft_tokens == 1) {
      EXPECT_GT(counts.n_accepted_tokens, 0.3 * static_cast<double>(counts.n_drafted_tokens));
    }
  }
}

// What a request is told of its drafts adds up to what was computed.
TEST(Engine, DraftsAreCountedForEachRequest) {
  RunningEngine engine({.draft_tokens = 3});
  std::atomic<int> n_accepted = 0, n_rejected = 0, n_left = 8;
  std::promise<void> done;
  for (int i = 0; i < 8; ++i) {
    EngineRequest r = question(fmt::format("What is {} + 77?", i), i % 2 == 0 ? 0.0f : 1.0f, i);
    r.request.max_new_tokens = 20 + 10 * i;
    r.on_event = [&](const TokenEvent& event) {
      n_accepted += event.was_drafted;
      n_rejected += event.n_rejected;
      if (event.finish && --n_left == 0) done.set_value();
      return true;
    };
    engine->submit(std::move(r));
  }
  done.get_future().wait();
  engine->stop();
  const Scheduler::Counts counts = engine->counts().scheduler;
  EXPECT_EQ(n_accepted, counts.n_accepted_tokens);
  EXPECT_EQ(n_accepted + n_rejected, counts.n_drafted_tokens);
  EXPECT_GT(n_accepted, 0);
  EXPECT_GT(n_rejected, 0);
}

TEST(Engine, WarmingUpLeavesNothingBehind) {
  RunningEngine cold({}), warm({.warms_up = true});
  EXPECT_EQ(warm->counts().n_steps, 0);
  EXPECT_EQ(warm->counts().n_computed_tokens, 0);
  EXPECT_EQ(warm->counts().n_generated_tokens, 0);
  EXPECT_EQ(warm->counts().scheduler.n_prompt_tokens, 0);
  EXPECT_EQ(warm->counts().scheduler.n_available_pages, cold->counts().scheduler.n_pages);
  for (int i = 0; i < 2; ++i) {
    Asked same;  // the tokens that warming up computes, more than a page
    for (int id = 0; id < 100; ++id) same.request.prompt.push_back(id);
    same.request.max_new_tokens = 20;
    SequenceId of_cold = 0, of_warm = 0;
    const Ending expected = cold.submit(same, &of_cold).get();
    const Ending ending = warm.submit(std::move(same), &of_warm).get();
    EXPECT_EQ(ending.tokens, expected.tokens);
    EXPECT_EQ(ending.cached_tokens, i == 0 ? 0 : 99);
    EXPECT_EQ(of_warm, of_cold);
  }
  EXPECT_EQ(texts_of(warm, true), texts_of(cold, true));
}

// The observer of the pool counts the same in another way, from the first step on.
TEST(Engine, CountsUsesOfExpertsInAWindow) {
  LoadedModel loaded({.directory = kTinyR1,
                      .n_threads = 1,
                      .context = 256,
                      .max_kv_tokens = 1024,
                      .step_tokens = 16,
                      .max_logits = 8,
                      .record_routing = true,
                      .count_experts = true});
  const auto recorded = [&] { return loaded.routing()->of_layer; };
  const Vocabulary vocabulary = {.size = loaded.config().vocab};
  warm_up(loaded.model(), loaded.cache(), vocabulary, loaded.context());
  std::vector<std::vector<std::vector<int64_t>>> before = {recorded()};
  Engine engine(loaded.model(), loaded.cache(), vocabulary, loaded.context(),
                {.keeps_pages = false, .expert_window = 16});  // blocks of 2 steps
  EXPECT_EQ(engine.expert_window(), 16);
  EXPECT_EQ(engine.expert_uses()->n_steps, 0) << "steps of warming up are left out";
  std::vector<Request> requests(3);
  for (int i = 0; i < 3; ++i) {
    requests[i].prompt = std::vector<int32_t>(5 + 9 * i, 20 + i);
    requests[i].max_new_tokens = 7 + 8 * i;
  }
  for (Request& request : requests) {
    EngineRequest asked;
    asked.request = request;
    asked.on_event = [](const TokenEvent&) { return true; };
    engine.submit(std::move(asked));
  }
  const auto expect_window = [&](size_t first, size_t end) {
    const auto uses = engine.expert_uses();
    EXPECT_EQ(uses->n_steps, end - first);
    for (size_t layer = 0; layer < uses->of_layer.size(); ++layer)
      for (size_t e = 0; e < uses->of_layer[layer].size(); ++e)
        ASSERT_EQ(uses->of_layer[layer][e], before[end][layer][e] - before[first][layer][e])
            << "layer " << layer << ", expert " << e;
  };
  while (engine.step()) {
    before.push_back(recorded());
    const size_t n = before.size() - 1;
    if (n % 2 == 0) expect_window(n < 16 ? 0 : n - 16, n);
  }
  const size_t n = before.size() - 1;
  ASSERT_GT(n, 20u);
  const auto last = engine.expert_uses();
  expect_window(n - last->n_steps, n);  // nothing is left to compute, so all steps are counted
  EXPECT_FALSE(engine.step());
  EXPECT_EQ(engine.expert_uses(), last) << "nothing is read again";
}

TEST(Engine, AgreesWithEachSequenceAlone) {
  LoadedModel loaded({.directory = kTinyR1,
                      .n_threads = 1,
                      .context = 2048,
                      .attention = AttentionForm::kAbsorbed});
  std::vector<Asked> requests = crowd();
  RunningEngine engine({});
  std::vector<std::future<Ending>> endings;
  for (Asked& r : requests) {
    r.request.stop_ids.clear();
    r.request.max_new_tokens = 100;
    endings.push_back(engine.submit(r));
  }
  const Vocabulary vocabulary = vocabulary_of(tokenizer(), loaded.config().vocab);
  for (size_t i = 0; i < endings.size(); ++i)
    EXPECT_EQ(endings[i].get().tokens, generated_alone(loaded.model(), loaded.cache(), vocabulary,
                                                       requests[i].request, 2048));
}

TEST(Engine, StopStringsEndTheAnswer) {
  RunningEngine engine({});
  Asked request = question("What is 478 + 356?");
  const std::string whole = engine.submit(request).get().text;
  request.answer.stops = {"tens"};
  const Ending stopped = engine.submit(request).get();
  EXPECT_EQ(stopped.text, whole.substr(0, whole.find("tens")));
  EXPECT_EQ(stopped.finish, FinishReason::kStop);
  request.answer.include_stop = true;
  EXPECT_EQ(engine.submit(request).get().text, whole.substr(0, whole.find("tens") + 4));
  request.answer.min_new_tokens = 150;
  EXPECT_EQ(engine.submit(request).get().text, whole);
}

TEST(Engine, NothingIsComputedAfterAStopString) {
  RunningEngine engine({});
  Asked request = question("What is 12 + 7?");
  request.request.stop_ids.clear();
  request.request.max_new_tokens = 1900;
  request.answer.stops = {"ones"};
  EXPECT_EQ(engine.submit(request).get().finish, FinishReason::kStop);
  while (engine->counts().scheduler.n_running > 0) std::this_thread::yield();
  EXPECT_LT(engine->counts().n_generated_tokens, 1000) << "a few steps until it is told";
}

TEST(Engine, EndsByLengthContextAndStopId) {
  RunningEngine engine({});
  Asked request = question("What is 12 + 7?");
  EXPECT_EQ(engine.submit(request).get().finish, FinishReason::kStop);
  request.request.max_new_tokens = 5;
  const Ending five = engine.submit(request).get();
  EXPECT_EQ(five.tokens.size(), 5);
  EXPECT_EQ(five.finish, FinishReason::kLength);
  request.request.stop_ids.clear();
  request.request.max_new_tokens = 100000;
  const Ending full = engine.submit(request).get();
  EXPECT_EQ(full.tokens.size() + request.request.prompt.size(), 2048);
  EXPECT_EQ(full.finish, FinishReason::kLength);
}

TEST(Engine, HeldBackTokensComeLater) {
  RunningEngine engine({});
  Asked request = question("What is 12 + 7?");
  request.request.sampling.min_new_tokens = 120;
  request.request.sampling.held_back = request.request.stop_ids;
  EXPECT_GE(engine.submit(request).get().tokens.size(), 120);
}

TEST(Engine, AbortedAndOverdueRequestsGiveTheirPagesBack) {
  RunningEngine engine({});
  Asked endless = question("What is 12 + 7?");
  endless.request.stop_ids.clear();
  endless.request.max_new_tokens = 2000;
  Asked overdue = endless;
  overdue.deadline = Clock::now() + std::chrono::milliseconds(30);
  SequenceId id = 0;
  auto gone = engine.submit(endless, &id);
  EXPECT_EQ(engine.submit(overdue).get().finish, FinishReason::kDeadline);
  engine->abort(id);
  EXPECT_EQ(engine.submit(question("What is 1 + 1?")).get().finish, FinishReason::kStop);
  const Scheduler::Counts counts = engine->counts().scheduler;
  EXPECT_EQ(counts.n_running, 0);
  EXPECT_EQ(counts.n_waiting, 0);
  EXPECT_EQ(counts.n_available_pages, counts.n_pages);
}

// Submitting and aborting within on_part reaches the engine between the same two steps.
TEST(Engine, ARequestThatIsAbortedAtOnceIsNotComputed) {
  RunningEngine engine({.async_output = false});
  Asked endless = question("What is 12 + 7?");
  endless.request.stop_ids.clear();
  endless.request.max_new_tokens = 1500;
  Asked first = question("What is 1 + 1?");
  std::atomic<int> n_parts_of_aborted = 0;
  bool submitted = false;
  std::promise<void> ended;
  first.answer.on_part = [&](const AnswerPart& part) {
    if (!std::exchange(submitted, true)) {
      endless.answer.on_part = [&](const AnswerPart&) { ++n_parts_of_aborted; };
      engine->abort(engine->submit(with_text(endless)));
    }
    if (part.finish) ended.set_value();
  };
  engine->submit(with_text(first));
  ended.get_future().wait();
  EXPECT_EQ(n_parts_of_aborted, 0);
  EXPECT_EQ(engine->counts().scheduler.n_running, 0);
}

TEST(Engine, ADeadlineHoldsInTheQueueToo) {
  RunningEngine engine({.max_running = 1});
  Asked endless = question("What is 12 + 7?");
  endless.request.stop_ids.clear();
  endless.request.max_new_tokens = 1900;
  SequenceId id = 0;
  auto running = engine.submit(endless, &id);
  while (engine->counts().n_generated_tokens == 0) std::this_thread::yield();
  Asked queued = question("What is 1 + 1?");
  queued.deadline = Clock::now();
  const Ending ending = engine.submit(queued).get();
  EXPECT_EQ(ending.finish, FinishReason::kDeadline);
  EXPECT_TRUE(ending.tokens.empty());
  EXPECT_EQ(running.wait_for(std::chrono::seconds(0)), std::future_status::timeout)
      << "the request before it still runs";
  engine->abort(id);
}

TEST(Engine, StopCancelsUnfinishedRequests) {
  std::future<Ending> ending;
  {
    RunningEngine engine({});
    Asked endless = question("What is 12 + 7?");
    endless.request.stop_ids.clear();
    endless.request.max_new_tokens = 2000;
    ending = engine.submit(endless);
  }
  EXPECT_EQ(ending.get().finish, FinishReason::kCancelled);
}

TEST(Engine, RefusesWhatCanNeverRun) {
  RunningEngine engine({.context = 128});
  Asked request = question("What is 12 + 7?");
  request.request.prompt.resize(128, 5);
  EXPECT_NE(error_of([&] { engine->submit(request); }).find("128 tokens and the context 128"),
            std::string::npos);
}

TEST(Engine, LogprobsAreOfTheChosenToken) {
  RunningEngine engine({});
  Asked request = question("What is 12 + 7?");
  request.request.sampling.n_top_logprobs = 2;
  const Ending ending = engine.submit(request).get();
  for (const float logprob : ending.logprobs) EXPECT_LE(logprob, 0);
}

// Log-probabilities of the tokens, computed by score() in double precision.
std::vector<double> expected_logprobs(LoadedModel& loaded, std::span<const int32_t> tokens) {
  std::vector<double> logprobs;
  score(loaded.model(), loaded.cache(), tokens, 0, [&](int64_t i, std::span<const float> logits) {
    double sum = 0;
    for (const float logit : logits) sum += std::exp(double{logit});
    if (i + 1 < static_cast<int64_t>(tokens.size()))
      logprobs.push_back(logits[tokens[i + 1]] - std::log(sum));
  });
  return logprobs;
}

TEST(Engine, ScoresPromptsAloneAndInAPreemptedBatch) {
  std::vector<Asked> requests = crowd();
  RunningEngine tight({.kv_tokens = 1152, .step_tokens = 64, .max_running = 24, .context = 1152});
  std::vector<std::future<Ending>> endings;
  for (Asked& r : requests) {
    r.first_scored = 0;
    r.request.sampling.n_top_logprobs = 2;
    if (endings.size() % 2 == 0) r.request.max_new_tokens = 0;
    endings.push_back(tight.submit(r));
  }
  LoadedModel loaded({.directory = kTinyR1,
                      .n_threads = 1,
                      .context = 2048,
                      .max_logits = 64,
                      .attention = AttentionForm::kAbsorbed});
  for (size_t i = 0; i < requests.size(); ++i) {
    const std::vector<int32_t>& prompt = requests[i].request.prompt;
    const std::vector<double> expected = expected_logprobs(loaded, prompt);
    const Ending ending = endings[i].get();
    EXPECT_EQ(ending.tokens.empty(), i % 2 == 0);
    ASSERT_EQ(ending.prompt.size(), prompt.size() - 1);
    for (size_t t = 0; t < expected.size(); ++t) {
      const ScoredToken& scored = ending.prompt[t];
      EXPECT_EQ(scored.token, prompt[t + 1]);
      EXPECT_NEAR(scored.logprob, expected[t], 1e-3) << i << " " << t;
      ASSERT_EQ(scored.top.size(), 2);
      EXPECT_GE(scored.top[0].logprob, std::max(scored.logprob, scored.top[1].logprob));
    }
  }
  EXPECT_GT(tight->counts().scheduler.n_preemptions, 0);
}

TEST(Engine, OnlyAScoredPromptMayAskForNoToken) {
  RunningEngine engine({});
  Asked request = question("What is 12 + 7?");
  request.request.max_new_tokens = 0;
  EXPECT_NE(error_of([&] { engine->submit(request); }).find("0 new tokens"), std::string::npos);
}

}  // namespace
}  // namespace tandem::test
