// Requests together and alone, prompts in chunks, conversations that go on, and no allocation in a
// step.
#include "engine/generator.h"

#include "engine/score.h"
#include "tests/check_close.h"
#include "tests/random_model.h"
#include "tests/small_config.h"

namespace tandem::test {
namespace {

struct Fixture {
  RandomModel random{small_config(), DType::kF8E4M3};
  TestEngine engine{random, cpu::best_isa(), AttentionForm::kAuto, DType::kBF16, 0, 32};
  Generator generator{engine.model, engine.cache, {61}, 1000};
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

TEST(Generator, SameSeedSameTextWhateverTheBatch) {
  Fixture f;
  std::vector<Request> requests;
  for (int i = 0; i < 7; ++i) requests.push_back(request(tokens(1 + 23 * i, i), 20 + i, i));
  std::vector<std::vector<int32_t>> alone;
  for (const Request& r : requests) alone.push_back(f.generator.run({&r, 1}, {}).front().tokens);
  const auto together = f.generator.run(requests, {});
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(together[i].tokens, alone[i]) << i;
    EXPECT_EQ(together[i].tokens.size(), 20 + i);
    EXPECT_EQ(together[i].finish, FinishReason::kLength);
  }
  EXPECT_EQ(f.engine.cache.n_free_pages(), 16);
}

TEST(Generator, WaitsForPagesWhenTheyAreShort) {
  Fixture f;
  std::vector<Request> requests;
  for (int i = 0; i < 9; ++i)
    requests.push_back(request(tokens(200, i), 10, i));  // 4 pages each, 16 in all
  const auto together = f.generator.run(requests, {});
  for (size_t i = 0; i < requests.size(); ++i)
    EXPECT_EQ(together[i].tokens, f.generator.run({&requests[i], 1}, {}).front().tokens);
}

TEST(Generator, GreedyFollowsTheScores) {
  Fixture f;
  Request r = request(tokens(40, 3), 12, 0);
  r.sampling.temperature = 0;
  const auto out = f.generator.run({&r, 1}, {}).front().tokens;
  std::vector<int32_t> all = r.prompt;
  all.insert(all.end(), out.begin(), out.end());
  score(f.engine.model, f.engine.cache, all, 39, [&](int64_t i, std::span<const float> logits) {
    if (i + 1 == static_cast<int64_t>(all.size())) return;
    EXPECT_EQ(std::max_element(logits.begin(), logits.end()) - logits.begin(), all[i + 1]);
  });
}

TEST(Generator, StopsAtStopIdsAndWhenAsked) {
  Fixture f;
  Request r = request(tokens(10, 1), 30, 9);
  const auto free_run = f.generator.run({&r, 1}, {}).front();
  r.stop_ids = {free_run.tokens[7]};
  const auto first = std::find(free_run.tokens.begin(), free_run.tokens.end(), free_run.tokens[7]);
  const auto stopped = f.generator.run({&r, 1}, {}).front();
  EXPECT_EQ(stopped.tokens, std::vector<int32_t>(free_run.tokens.begin(), first));
  EXPECT_EQ(stopped.finish, FinishReason::kStop);

  r.stop_ids.clear();
  int seen = 0;
  const auto asked =
      f.generator.run({&r, 1}, {.on_token = [&](int, const Sampled&) { return ++seen < 5; },
                                .cancelled = {},
                                .on_prefill = {}});
  EXPECT_EQ(asked.front().tokens.size(), 5u);
  EXPECT_EQ(asked.front().finish, FinishReason::kStop);

  int steps = 0;
  const auto cancelled = f.generator.run(
      {&r, 1}, {.on_token = {}, .cancelled = [&] { return ++steps > 3; }, .on_prefill = {}});
  EXPECT_EQ(cancelled.front().finish, FinishReason::kCancelled);
  EXPECT_EQ(cancelled.front().tokens.size(), 3u);
  EXPECT_EQ(f.engine.cache.n_free_pages(), 16);
}

TEST(Generator, AConversationComputesOnlyWhatIsNew) {
  Fixture f;
  KvSequence kv;
  Request r = request(tokens(100, 2), 15, 4);
  r.kv = &kv;
  const auto first = f.generator.run({&r, 1}, {}).front();
  EXPECT_EQ(first.cached_tokens, 0);
  Request next = request(r.prompt, 15, 5);
  next.prompt.insert(next.prompt.end(), first.tokens.begin(), first.tokens.end() - 3);
  for (const int32_t t : tokens(40, 8)) next.prompt.push_back(t);
  const auto fresh = f.generator.run({&next, 1}, {}).front();
  next.kv = &kv;
  const auto reused = f.generator.run({&next, 1}, {}).front();
  EXPECT_GE(reused.cached_tokens, 112);
  EXPECT_LT(reused.cached_tokens, 116);
  EXPECT_EQ(reused.tokens, fresh.tokens);
  next.prompt.resize(50);  // shorter than what is cached
  EXPECT_EQ(f.generator.run({&next, 1}, {}).front().cached_tokens, 49);
}

TEST(Generator, ContextEndsTheAnswer) {
  Fixture f;
  Generator small_context(f.engine.model, f.engine.cache, {61}, 50);
  const Request r = request(tokens(40, 2), 100, 4);
  const auto c = small_context.run({&r, 1}, {}).front();
  EXPECT_EQ(c.tokens.size(), 10u);
  EXPECT_EQ(c.finish, FinishReason::kLength);
}

// Rows of logits that the tokenizer has no token for, in between and at the end.
TEST(Generator, NeverSamplesIdsWithoutToken) {
  Fixture f;
  Request r = request(tokens(10, 1), 400, 3);
  r.sampling.temperature = 100;  // nearly all alike
  const auto seen_by = [&](Generator& generator) {
    std::vector<int> n(61);
    const std::vector<Completion> done = generator.run({&r, 1}, {});
    for (const int32_t t : done.front().tokens) ++n[t];
    return n;
  };
  Generator with_holes(f.engine.model, f.engine.cache, {60, {0, 31, 59}}, 1000);
  const auto all = seen_by(f.generator), some = seen_by(with_holes);
  for (const int t : {0, 31, 59, 60}) {
    EXPECT_GT(all[t], 0) << t;
    EXPECT_EQ(some[t], 0) << t;
  }
}

TEST(Generator, RefusesWhatCanNeverRun) {
  Fixture f;
  for (const Request& r : {request({}, 5, 0), request(tokens(1000, 0), 5, 0), request({61}, 5, 0),
                           request({-1}, 5, 0), request({1}, 0, 0)})
    EXPECT_THROW(f.generator.run({&r, 1}, {}), Error);
  EXPECT_EQ(f.engine.cache.n_free_pages(), 16);
}

}  // namespace
}  // namespace tandem::test
