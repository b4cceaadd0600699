// Which backend a router chooses, when backends are up and down, and when a request is repeated.
// Times are made up.
#include <gtest/gtest.h>

#include "router/backend_pool.h"
#include "router/choice.h"
#include "router/retry.h"
#include "tests/error_of.h"

namespace tandem {
namespace {

using std::chrono::seconds;
using Pointer = BackendPool::Pointer;

const RouterClock::time_point kStart{};

HttpAddress address(int port) {
  return parse_http_address("http://127.0.0.1:" + std::to_string(port), "backend");
}

size_t best(std::vector<Candidate> candidates, double seconds_per_byte = 0) {
  return best_candidate(candidates, seconds_per_byte);
}

TEST(BestCandidate, HasTheLeastExpectedLatency) {
  EXPECT_EQ(best({{.answer_seconds = 2}, {.answer_seconds = 1}, {.answer_seconds = 3}}), 1u);
  // Twice as fast, and with as many requests: still faster, up to 2 s against 1 s * (1 + 1).
  EXPECT_EQ(best({{.answer_seconds = 1, .n_running = 1}, {.answer_seconds = 2.01}}), 0u);
  EXPECT_EQ(best({{.answer_seconds = 1, .n_running = 1}, {.answer_seconds = 1.99}}), 1u);
  EXPECT_EQ(best({{.answer_seconds = 1, .n_running = 7}, {.answer_seconds = 4, .n_running = 1}}),
            0u);  // equal: 8 s; the first was not chosen later
}

TEST(BestCandidate, WhatIsUnknownCountsLikeTheFastest) {
  EXPECT_EQ(best({{.answer_seconds = 1, .last_chosen = 1}, {.answer_seconds = 2}, {}}), 2u);
  EXPECT_EQ(best({{.n_running = 1}, {.n_running = 0, .last_chosen = 5}}), 1u);
  EXPECT_EQ(best({{.answer_seconds = 1}, {.n_running = 1}}), 0u);
}

TEST(BestCandidate, EqualOnesTakeTurns) {
  EXPECT_EQ(best({{.last_chosen = 3}, {.last_chosen = 1}, {.last_chosen = 2}}), 1u);
}

// 1,000 bytes at 1 ms each are worth one second of waiting, no more.
TEST(BestCandidate, TheCachedBeginningIsWorthItsComputation) {
  const auto with = [](double other_seconds) {
    return best({{.answer_seconds = 2, .n_running = 1, .known_bytes = 1000},
                 {.answer_seconds = other_seconds}},
                1e-3);
  };
  EXPECT_EQ(with(3.01), 0u);
  EXPECT_EQ(with(2.99), 1u);
}

TEST(Speed, IsAveragedAndGrowsOld) {
  Speed speed;
  EXPECT_FALSE(speed.expected_seconds(100, kStart));
  speed.add_stream(1, 0.1, kStart);
  EXPECT_DOUBLE_EQ(*speed.expected_seconds(100, kStart), 1 + 100 * 0.1);
  speed.add_stream(2, {}, kStart);  // a stream of one event
  EXPECT_DOUBLE_EQ(*speed.first_seconds(), 0.8 * 1 + 0.2 * 2);
  EXPECT_DOUBLE_EQ(*speed.token_seconds(), 0.1);
  speed.add_whole(40, 200, kStart);
  EXPECT_DOUBLE_EQ(*speed.token_seconds(), 0.8 * 0.1 + 0.2 * 0.2);
  const double now = *speed.expected_seconds(10, kStart);
  EXPECT_DOUBLE_EQ(*speed.expected_seconds(10, kStart + 2 * Speed::kHalfLife), now / 4);
  Speed whole;
  whole.add_whole(5, 0, kStart);  // no usage
  EXPECT_FALSE(whole.expected_seconds(1, kStart));
}

TEST(Health, GoesDownAtOnceAndUpAfterGoodChecks) {
  Health health;
  EXPECT_FALSE(health.is_up());
  EXPECT_FALSE(health.on_failure("refused"));  // it was not up
  EXPECT_TRUE(health.on_good_check());         // the first time one check is enough
  EXPECT_TRUE(health.is_up());
  EXPECT_FALSE(health.on_good_check());
  EXPECT_TRUE(health.on_failure("reset"));
  EXPECT_FALSE(health.on_failure("refused"));
  EXPECT_EQ(health.why_down(), "refused");
  EXPECT_FALSE(health.on_good_check());
  EXPECT_FALSE(health.on_failure("refused"));  // the good checks have to follow each other
  EXPECT_FALSE(health.on_good_check());
  EXPECT_EQ(health.n_ups(), 1);
  EXPECT_TRUE(health.on_good_check());
  EXPECT_EQ(health.n_ups(), 2);
}

TEST(Health, OneSlowCheckIsNotEnough) {
  Health health;
  health.on_good_check();
  EXPECT_FALSE(health.on_slow_check("slow"));
  EXPECT_TRUE(health.is_up());
  EXPECT_FALSE(health.on_good_check());
  EXPECT_FALSE(health.on_slow_check("slow"));
  EXPECT_TRUE(health.on_slow_check("slow"));
  EXPECT_FALSE(health.is_up());
}

class Pool : public testing::Test {
 protected:
  Pointer add(int port, const std::string& model = "m", bool registered = false) {
    const Pointer backend = pool_.add(address(port), registered, kStart);
    backend->health.on_good_check();
    backend->models = {{.id = model, .json = {{"id", model}}}};
    return backend;
  }
  Pointer choose(const RequestSummary& request = {}, const std::vector<Pointer>& tried = {}) {
    const Pointer backend = pool_.choose(request, tried, kStart).backend;
    EXPECT_EQ(backend != nullptr, pool_.has_choice(request, tried));
    return backend;
  }

  BackendPool pool_;
};

TEST_F(Pool, OnlyWhatIsUpAndNotDrainingAndHasTheModel) {
  EXPECT_FALSE(choose());
  const Pointer a = add(1), b = add(2), c = add(3, "other");
  EXPECT_EQ(choose({.model = "other"}), c);
  EXPECT_FALSE(choose({.model = "third"}));
  a->draining = true;
  EXPECT_EQ(choose({.model = "m"}), b);
  EXPECT_FALSE(choose({.model = "m"}, {b}));
  EXPECT_EQ(choose({}, {b}), c);
  b->health.on_failure("reset");
  EXPECT_FALSE(choose({.model = "m"}));
  a->draining = false;
  EXPECT_EQ(choose({.model = "m"}), a);
}

TEST_F(Pool, PrefillServersAreChosenWhereNothingElseAnswers) {
  const Pointer prefill = add(1), decode = add(2);
  prefill->models[0].role = "prefill";
  decode->models[0].role = "decode";
  for (int i = 0; i < 4; ++i) EXPECT_EQ(choose(), decode);
  EXPECT_EQ(choose({}, {decode}), prefill) << "a repeated request";
  decode->health.on_failure("reset");
  EXPECT_EQ(choose(), prefill);
  const Pointer whole = add(3);
  EXPECT_EQ(choose(), whole);
}

TEST_F(Pool, UnknownModelsAreKnownToBeSo) {
  EXPECT_TRUE(pool_.may_have_model("m"));
  const Pointer a = add(1);
  EXPECT_FALSE(pool_.may_have_model("other"));
  a->health.on_failure("refused");
  EXPECT_TRUE(pool_.may_have_model("m"));  // 503, not 404
  EXPECT_FALSE(pool_.may_have_model("other"));
  pool_.add(address(2), false, kStart);
  EXPECT_TRUE(pool_.may_have_model("other"));  // the new one was not asked yet
}

TEST_F(Pool, RequestsWithOneBeginningGoToOneBackend) {
  const Pointer a = add(1), b = add(2);
  const RequestSummary first{.prefixes = prefix_hashes(std::string(10000, 'x'))};
  const RequestSummary other{.prefixes = prefix_hashes(std::string(10000, 'y'))};
  const Pointer has_first = choose(first), has_other = choose(other);
  EXPECT_NE(has_first, has_other);  // equal otherwise: they take turns
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(choose(first), has_first);
    EXPECT_EQ(choose(other), has_other);
  }
  // 9,984 known bytes, 20 us each: just less than two answers that were not measured, 0.1 s each.
  has_first->n_running = 1;
  EXPECT_EQ(choose(first), has_first);
  has_first->n_running = 2;
  EXPECT_EQ(choose(first), has_other);
  has_first->n_running = 0;
  // What goes down has lost its cache.
  pool_.on_down(*has_first);
  EXPECT_EQ(pool_.choose(first, {has_other}, kStart).known_bytes, 0);
}

TEST_F(Pool, PromptSpeedIsMeasured) {
  EXPECT_DOUBLE_EQ(pool_.seconds_per_byte(), 20e-6);
  pool_.add_prompt(100, 1000);  // too short to tell
  EXPECT_DOUBLE_EQ(pool_.seconds_per_byte(), 20e-6);
  pool_.add_prompt(2, 2000);
  EXPECT_DOUBLE_EQ(pool_.seconds_per_byte(), 1e-3);
  pool_.add_answer(50);
  EXPECT_DOUBLE_EQ(pool_.answer_tokens(), 50);
}

TEST_F(Pool, ListsChangeWhileItRuns) {
  int n_added = 0;
  pool_.on_added = [&](const Pointer&) { ++n_added; };
  pool_.set_listed({address(1), address(2)}, kStart);
  const Pointer one = pool_.find("127.0.0.1:1"), three = add(3, "m", true);
  EXPECT_EQ(n_added, 3);
  pool_.set_listed({address(2), address(4)}, kStart);
  EXPECT_TRUE(one->removed);
  EXPECT_FALSE(pool_.find("127.0.0.1:1"));
  EXPECT_TRUE(pool_.find("127.0.0.1:4"));
  EXPECT_EQ(pool_.find("127.0.0.1:3"), three);  // it registered itself
  EXPECT_EQ(n_added, 4);
  EXPECT_EQ(pool_.add(address(3), true, kStart), three);
  EXPECT_FALSE(pool_.remove("127.0.0.1:9"));
  EXPECT_TRUE(pool_.remove("127.0.0.1:3"));
  EXPECT_TRUE(three->removed);
}

TEST_F(Pool, LostBackendsAreForgottenIfTheyRegistered) {
  const Pointer listed = add(1), registered = add(2, "m", true), up = add(3, "m", true);
  listed->health.on_failure("refused");
  registered->health.on_failure("refused");
  pool_.forget_lost(kStart + seconds(10), seconds(10));
  EXPECT_EQ(pool_.all().size(), 3u);
  pool_.forget_lost(kStart + seconds(11), seconds(10));
  EXPECT_EQ(pool_.all(), (std::vector<Pointer>{listed, up}));
}

TEST(NextStep, FollowsFromWhatTheClientHasSeen) {
  using End = AttemptEnd;
  using Step = NextStep;
  for (const bool others : {false, true}) {
    EXPECT_EQ(next_step({.end = End::kAnswered, .has_sent = true, .others_left = others}),
              Step::kDone);
    EXPECT_EQ(next_step({.end = End::kClientGone, .others_left = others}), Step::kDone);
    EXPECT_EQ(
        next_step(
            {.end = End::kFailed, .has_sent = true, .is_stream = true, .others_left = others}),
        Step::kErrorEvent);
    EXPECT_EQ(next_step({.end = End::kFailed, .has_sent = true, .others_left = others}),
              Step::kBreakOff);
  }
  EXPECT_EQ(next_step({.end = End::kFailed, .others_left = true}), Step::kTryAnother);
  EXPECT_EQ(next_step({.end = End::kFailed, .is_stream = true, .others_left = true}),
            Step::kTryAnother);
  EXPECT_EQ(next_step({.end = End::kFailed, .others_left = true, .n_attempts = kMaxAttempts}),
            Step::kUnavailable);
  EXPECT_EQ(next_step({.end = End::kFailed, .others_left = true, .n_attempts = kMaxAttempts - 1}),
            Step::kTryAnother);
  EXPECT_EQ(next_step({.end = End::kFailed}), Step::kUnavailable);
  EXPECT_EQ(next_step({.end = End::kRefused, .others_left = true, .has_refusal = true}),
            Step::kTryAnother);
  EXPECT_EQ(next_step({.end = End::kRefused, .has_refusal = true}), Step::kPassRefusalOn);
  EXPECT_EQ(next_step({.end = End::kFailed, .has_refusal = true, .n_attempts = 2}),
            Step::kPassRefusalOn);
}

}  // namespace
}  // namespace tandem
