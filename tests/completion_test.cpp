// Requests in a batch and alone, chunked prompts, multi-turn conversations.
#include "engine/completion.h"

#include "tests/check_close.h"
#include "tests/plain_engine.h"
#include "tests/random_model.h"
#include "tests/small_config.h"

namespace tandem::test {
namespace {

// Uses one form of attention: kAuto chooses by the number of tokens in a step, so other chunks
// would round differently.
struct Fixture {
  RandomModel random{small_config(), DType::kF8E4M3};
  TestEngine engine{random, cpu::best_isa(), AttentionForm::kAbsorbed, DType::kBF16, 0, 32};
  Engine loop{engine.model, engine.cache, {61}, 1000, {}};

  std::vector<Completion> run(std::span<const Request> requests) {
    return complete(loop, requests);
  }
  Completion run(const Request& request, const CompletionHooks& hooks = {}) {
    return complete(loop, {&request, 1}, hooks).front();
  }
  // All pages are available again: no request runs or waits.
  int n_available_pages() const {
    const Scheduler::Counts counts = loop.counts().scheduler;
    EXPECT_EQ(counts.n_running + counts.n_waiting, 0);
    return counts.n_available_pages;
  }
};

Request request(std::vector<int32_t> prompt, int n, uint64_t seed) {
  Request r;
  r.prompt = std::move(prompt);
  r.max_new_tokens = n;
  r.sampling.temperature = 1;
  r.sampling.top_p = 1;
  r.sampling.seed = seed;
  return r;
}

std::vector<int32_t> tokens(int n, int seed) {
  std::vector<int32_t> t(n);
  for (int i = 0; i < n; ++i) t[i] = (seed * 17 + i * 7 + i * i) % 61;
  return t;
}

TEST(Completion, SameSeedSameTextWhateverTheBatch) {
  Fixture f;
  std::vector<Request> requests;
  for (int i = 0; i < 7; ++i) requests.push_back(request(tokens(1 + 23 * i, i), 20 + i, i));
  std::vector<std::vector<int32_t>> alone;
  for (const Request& r : requests) alone.push_back(f.run(r).tokens);
  const auto together = f.run(requests);
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(together[i].tokens, alone[i]) << i;
    EXPECT_EQ(together[i].tokens.size(), 20 + i);
    EXPECT_EQ(together[i].finish, FinishReason::kLength);
  }
  EXPECT_EQ(f.n_available_pages(), 16);
}

TEST(Completion, WaitsForPagesWhenTheyAreShort) {
  Fixture f;
  std::vector<Request> requests;
  for (int i = 0; i < 9; ++i)
    requests.push_back(request(tokens(200, i), 10, i));  // 4 pages each, 16 in total
  const auto together = f.run(requests);
  for (size_t i = 0; i < requests.size(); ++i)
    EXPECT_EQ(together[i].tokens, f.run(requests[i]).tokens);
}

TEST(Completion, GreedyFollowsTheScores) {
  Fixture f;
  Request r = request(tokens(40, 3), 12, 0);
  r.sampling.temperature = 0;
  const auto out = f.run(r).tokens;
  std::vector<int32_t> all = r.prompt;
  all.insert(all.end(), out.begin(), out.end());
  score(f.loop, all, 39, [&](int64_t i, std::span<const float> logits) {
    if (i + 1 == static_cast<int64_t>(all.size())) return;
    EXPECT_EQ(std::max_element(logits.begin(), logits.end()) - logits.begin(), all[i + 1]);
  });
}

TEST(Completion, StopsAtStopIdsAndWhenAsked) {
  Fixture f;
  Request r = request(tokens(10, 1), 30, 9);
  const auto free_run = f.run(r);
  r.stop_ids = {free_run.tokens[7]};
  const auto first = std::find(free_run.tokens.begin(), free_run.tokens.end(), free_run.tokens[7]);
  const auto stopped = f.run(r);
  EXPECT_EQ(stopped.tokens, std::vector<int32_t>(free_run.tokens.begin(), first));
  EXPECT_EQ(stopped.finish, FinishReason::kStop);

  r.stop_ids.clear();
  int seen = 0;
  const auto asked = f.run(r, {.on_token = [&](int, const TokenEvent&) { return ++seen < 5; },
                               .cancelled = {},
                               .on_prefill = {}});
  EXPECT_EQ(asked.tokens.size(), 5u);
  EXPECT_EQ(asked.finish, FinishReason::kStop);

  int steps = 0;
  const auto cancelled =
      f.run(r, {.on_token = {}, .cancelled = [&] { return ++steps > 3; }, .on_prefill = {}});
  EXPECT_EQ(cancelled.finish, FinishReason::kCancelled);
  EXPECT_EQ(cancelled.tokens.size(), 3u);
  EXPECT_EQ(f.n_available_pages(), 16);
}

// A second turn of 40 tokens after an answer of 15 tokens that ended by length.
Request next_turn(const std::vector<int32_t>& prompt, std::span<const int32_t> answer, int seed) {
  Request next = request(prompt, 15, seed);
  next.prompt.insert(next.prompt.end(), answer.begin(), answer.end());
  for (const int32_t t : tokens(40, 8)) next.prompt.push_back(t);
  return next;
}

TEST(Completion, AConversationComputesOnlyWhatIsNew) {
  Fixture anew;
  for (int seed = 0; seed < 40; ++seed) {
    Fixture f;
    const Request r = request(tokens(100, 2), 15, seed);
    const Completion first = f.run(r);
    EXPECT_EQ(first.cached_tokens, 0);
    Request next = next_turn(r.prompt, first.tokens, seed);
    anew.loop.forget_pages();
    const Completion reused = f.run(next);
    EXPECT_EQ(reused.cached_tokens, 114) << "the answer's last token was never computed";
    EXPECT_EQ(reused.tokens, anew.run(next).tokens) << seed;
    next.prompt.resize(50);  // a prefix of the cached text
    EXPECT_EQ(f.run(next).cached_tokens, 49);
  }
}

// kAuto chooses the form by the number of tokens in a step, so other chunks agree within a bound
// and not bit for bit. Computes in float, because rounding to BF16 may change a choice of the
// router.
TEST(Completion, AutomaticAttentionAgreesAcrossChunks) {
  RandomModel random(small_config(), DType::kF8E4M3);
  TestEngine engine(random, cpu::Isa::kReference, AttentionForm::kAuto, DType::kF32, 0, 160);
  const std::vector<int32_t> text = tokens(155, 2), pages = {3, 7, 5};
  const auto anew = engine.run(text, 155, pages);
  ASSERT_TRUE(naive_is_cheaper(engine.model.config().mla, 155, 155));
  ASSERT_FALSE(naive_is_cheaper(engine.model.config().mla, 1, 115));
  double difference = 0;
  for (const int piece : {1, 7, 40}) {
    const auto pieces = engine.run(text, piece, pages);
    for (size_t i = 0; i < text.size(); ++i) {
      expect_close(pieces[i], anew[i], 1e-4 * largest(anew[i]));
      for (size_t v = 0; v < anew[i].size(); ++v)
        difference = std::max(difference, std::fabs(double{pieces[i][v]} - anew[i][v]));
    }
  }
  EXPECT_GT(difference, 0) << "both forms were computed";
}

// Steps have at most 32 tokens. A request that answers counts as computed.
TEST(Completion, ReportsHowMuchOfThePromptsIsComputed) {
  Fixture f;
  std::vector<std::pair<int64_t, int64_t>> seen;
  CompletionHooks hooks;
  hooks.on_prefill = [&](int64_t done, int64_t total) { seen.emplace_back(done, total); };
  using Seen = std::vector<std::pair<int64_t, int64_t>>;
  const Completion alone = f.run(request(tokens(100, 2), 5, 1), hooks);
  EXPECT_EQ(seen, (Seen{{32, 100}, {64, 100}, {96, 100}, {100, 100}}));
  EXPECT_GT(alone.prefill_seconds, 0);
  EXPECT_GT(alone.decode_seconds, 0);
  EXPECT_LT(alone.prefill_seconds + alone.decode_seconds, 60);
  // Three steps of 32 tokens, one of 4, and four of one token.
  const EngineCounts counts = f.loop.counts();
  EXPECT_EQ(counts.n_steps, 8);
  EXPECT_EQ(counts.n_computed_tokens, 104);
  EXPECT_EQ(counts.n_generated_tokens, 5);
  EXPECT_EQ(counts.steps_of[0], 4);
  EXPECT_EQ(counts.steps_of[2], 1);
  EXPECT_EQ(counts.steps_of[5], 3);
  EXPECT_EQ(counts.scheduler.n_prompt_tokens, 100);
  EXPECT_EQ(f.run(request(tokens(10, 9), 1, 1)).decode_seconds, 0) << "there is one token";
  seen.clear();
  f.loop.forget_pages();
  const std::vector<Request> two = {request(tokens(40, 3), 1, 1), request(tokens(30, 4), 1, 1)};
  complete(f.loop, two, hooks);
  EXPECT_EQ(seen, (Seen{{32, 70}, {64, 70}, {70, 70}}));
}

TEST(Completion, ContextEndsTheAnswer) {
  Fixture f;
  Engine small_context(f.engine.model, f.engine.cache, {61}, 50, {});
  const Request r = request(tokens(40, 2), 100, 4);
  const Completion c = complete(small_context, {&r, 1}).front();
  EXPECT_EQ(c.tokens.size(), 10u);
  EXPECT_EQ(c.finish, FinishReason::kLength);
}

// The tokenizer has no token for some ids, in the middle and at the end of the vocabulary.
TEST(Completion, NeverSamplesIdsWithoutToken) {
  Fixture f;
  Request r = request(tokens(10, 1), 400, 3);
  r.sampling.temperature = 100;  // a nearly uniform distribution
  const auto seen_by = [&](Engine& engine) {
    std::vector<int> n(61);
    const std::vector<Completion> done = complete(engine, {&r, 1});
    for (const int32_t t : done.front().tokens) ++n[t];
    return n;
  };
  Engine with_holes(f.engine.model, f.engine.cache, {60, {0, 31, 59}}, 1000, {});
  const auto all = seen_by(f.loop), some = seen_by(with_holes);
  for (const int t : {0, 31, 59, 60}) {
    EXPECT_GT(all[t], 0) << t;
    EXPECT_EQ(some[t], 0) << t;
  }
}

TEST(Completion, RefusesWhatCanNeverRun) {
  Fixture f;
  for (const Request& r : {request({}, 5, 0), request(tokens(1000, 0), 5, 0), request({61}, 5, 0),
                           request({-1}, 5, 0), request({1}, 0, 0)})
    EXPECT_THROW(f.run(r), Error);
  EXPECT_EQ(f.n_available_pages(), 16);
}

}  // namespace
}  // namespace tandem::test
