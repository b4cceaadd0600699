// Servers that answer requests which arrive at random: the closed formula, the simulation, and
// calculations that share nothing with either.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "offload/servers/server_speed.h"
#include "offload/simulation/arrivals.h"
#include "tests/error_of.h"

namespace tandem {
namespace {

// 20 ms, 0.5 ms for a sequence and 0.1 ms for a token of a prompt.
double round_step(double sequences, double prompt_tokens) {
  return 0.020 + 0.0005 * sequences + 0.0001 * prompt_tokens;
}

ServerGroup round_servers(ServerRole role, int n, double times = 1) {
  return {.role = role,
          .n_servers = n,
          .n_replicas = 1,
          .step = std::make_shared<StepTable>(
              [times](int s, int p) { return times * round_step(s, p); }),
          .chunk_tokens = 512,
          .most_sequences = 256};
}

ServerSystem round_both(int n) {
  ServerSystem s;
  s.groups = {round_servers(ServerRole::kBoth, n)};
  s.prompt_tokens = 1024;
  s.output_tokens = 200;
  return s;
}

// The keys of a token are 10 kB, and the network sends 1 GB/s.
ServerSystem round_split(int n_prefill, int n_decode) {
  return {.groups = {round_servers(ServerRole::kPrefill, n_prefill),
                     round_servers(ServerRole::kDecode, n_decode)},
          .prompt_tokens = 1024,
          .output_tokens = 200,
          .kv_bytes_per_token = 10e3,
          .network = {1e9, 1e-3}};
}

TEST(StepTable, InterpolatesBetweenPricedSteps) {
  int n_priced = 0;
  StepTable table([&](int sequences, int tokens) {
    ++n_priced;
    return 1.0 + 2 * sequences + 3 * tokens + sequences * tokens;
  });
  EXPECT_DOUBLE_EQ(table(16, 0), 33);
  EXPECT_EQ(n_priced, 1);
  EXPECT_DOUBLE_EQ(table(5, 0), 11);
  EXPECT_EQ(n_priced, 3) << "4 and 6";
  EXPECT_DOUBLE_EQ(table(5.5, 0), 12);
  EXPECT_EQ(n_priced, 3);
  EXPECT_DOUBLE_EQ(table(5, 700), 1 + 10 + 2100 + 3500);
  EXPECT_DOUBLE_EQ(table(0, 512), 1 + 1536);
  EXPECT_EQ(table(0, 0), 0) << "no step";
  StepTable jumps([](int, int tokens) { return tokens >= 700 ? 1.0
                                               : tokens > 0  ? 100.0
                                                             : 7.0; },
                  700);
  EXPECT_EQ(jumps(2, 0.25), 100) << "a step with prompts is none without";
  EXPECT_EQ(jumps(2.5, 699), 100);
  EXPECT_EQ(jumps(2.5, 700), 1);
  EXPECT_EQ(jumps(2.5, 701), 1);
  EXPECT_EQ(jumps(2.5, 600), 100);
}

// Prompts of one chunk and answers of one token: a queue with Poisson arrivals and equal services,
// whose mean wait is known (Pollaczek and Khinchine).
TEST(ServerSpeed, OneTokenIsAKnownQueue) {
  ServerSystem s = round_both(1);
  s.prompt_tokens = 300;
  s.output_tokens = 1;
  const double service = round_step(0, 300);
  for (const double busy : {0.2, 0.5, 0.8}) {
    const ServerSpeed speed = speed_at(s, busy / service);
    EXPECT_TRUE(speed.sustained);
    EXPECT_NEAR(speed.busy, busy, 1e-9);
    EXPECT_NEAR(speed.first_token_seconds, service + busy * service / (2 * (1 - busy)), 1e-9);
    EXPECT_EQ(speed.gap_seconds, 0);
  }
  EXPECT_FALSE(speed_at(s, 1.01 / service).sustained);
  EXPECT_NEAR(most_requests_per_second(s), 1 / service, 0.001 / service);
}

// A single server with one sequence at a time, where everything can be written down.
TEST(ServerSpeed, AnIdleServerByHand) {
  const ServerSpeed one = speed_at(round_both(1), 1e-6);
  EXPECT_NEAR(one.first_token_seconds, 2 * round_step(0, 512), 1e-4);
  EXPECT_NEAR(one.gap_seconds, round_step(1, 0), 1e-4);
  EXPECT_NEAR(one.request_seconds, one.first_token_seconds + 199 * one.gap_seconds, 1e-9);
  // 960 tokens are in whole pages. The keys of the second chunk, of 448, follow it, and the decode
  // server computes 64 tokens.
  const ServerSpeed split = speed_at(round_split(1, 1), 1e-6);
  EXPECT_EQ(round_split(1, 1).paged_tokens(), 960);
  EXPECT_NEAR(split.keys_seconds, 448 * 10e3 / 1e9 + 2e-3, 1e-9);
  EXPECT_NEAR(split.first_token_seconds,
              round_step(0, 512) + round_step(0, 448) + split.keys_seconds + round_step(0, 64),
              1e-4);
  // A network that takes longer than the chunks: the first chunk, and then all keys.
  ServerSystem slow = round_split(1, 1);
  slow.network = {10e6, 0};
  EXPECT_NEAR(speed_at(slow, 1e-6).keys_seconds, 960 * 10e3 / 10e6 - round_step(0, 448), 1e-9);
  slow.prompt_tokens = 64 * 3;
  EXPECT_EQ(slow.paged_tokens(), 128) << "at least one token is computed by the decode server";
}

TEST(ServerSpeed, TheNetworkIsABound) {
  ServerSystem s = round_split(4, 2);
  s.network = {20e6, 0};
  // Two receivers: 9.6 MB a request.
  const double most = 2 * 20e6 / (960 * 10e3);
  EXPECT_TRUE(speed_at(s, 0.99 * most).sustained);
  EXPECT_FALSE(speed_at(s, 1.01 * most).sustained);
  EXPECT_NEAR(speed_at(s, 0.5 * most).network_busy, 0.5, 1e-9);
}

// Requests on the way are their rate times the time of each (Little).
TEST(ServerSpeed, AConcurrencyGivesARate) {
  for (const ServerSystem& s : {round_both(2), round_split(1, 2)})
    for (const int concurrency : {1, 8, 40}) {
      const ServerSpeed speed = speed_for(s, {.concurrency = concurrency});
      EXPECT_TRUE(speed.sustained);
      EXPECT_NEAR(speed.requests_per_second * speed.request_seconds, concurrency,
                  0.01 * concurrency);
    }
  // Where the caches of so many do not fit, some wait.
  ServerSystem small = round_both(2);
  small.groups[0].most_sequences = 4;
  const ServerSpeed speed = speed_for(small, {.concurrency = 100});
  EXPECT_NEAR(speed.requests_per_second * speed.request_seconds, 100, 1);
  EXPECT_LE(speed.sequences, 8.01);
  EXPECT_GT(speed.first_token_seconds, 10 * speed_at(small, 0.1).first_token_seconds);
}

TEST(ServerSpeed, BoundsLimitTheRate) {
  const ServerSystem s = round_split(2, 2);
  const ServerGoal goals[] = {{.concurrency = 0, .first_token_seconds = 0.4},
                              {.concurrency = 0, .gap_seconds = 0.04},
                              {.concurrency = 0, .tokens_per_second_per_user = 35}};
  for (const ServerGoal& goal : goals) {
    const ServerSpeed speed = speed_for(s, goal);
    EXPECT_TRUE(meets(goal, speed));
    EXPECT_GT(speed.requests_per_second, 0.1);
    EXPECT_FALSE(meets(goal, speed_at(s, 1.05 * speed.requests_per_second)));
  }
  const double most = most_requests_per_second(s);
  EXPECT_NEAR(speed_for(s, {.concurrency = 0}).requests_per_second, 0.9 * most, 1e-3 * most);
  const ServerSpeed too_many = speed_for(s, {.requests_per_second = 2 * most});
  EXPECT_FALSE(too_many.sustained);
  EXPECT_NEAR(too_many.requests_per_second, 0.9 * most, 1e-3 * most);
  EXPECT_FALSE(meets({}, too_many));
}

// A chunk stops answers: with roles no gap is as long.
TEST(ServerSpeed, RolesShortenGaps) {
  const ServerSpeed both = speed_at(round_both(2), 2), split = speed_at(round_split(1, 1), 2);
  EXPECT_GT(both.p99_gap_seconds, round_step(0, 490));
  EXPECT_LT(split.p99_gap_seconds, round_step(64, 64));
}

// The formula and the simulation of the same servers, for the shares of their capacity that make
// sense. The bounds are what the formula leaves out: the order of arrivals within a step, and how
// the number of sequences varies.
TEST(Arrivals, AgreeWithTheFormula) {
  struct Case {
    ServerSystem system;
    const char* name;
  };
  ServerSystem mixed = round_both(2);
  mixed.groups.push_back(round_servers(ServerRole::kBoth, 2, 1.6));
  ServerSystem short_prompts = round_both(1);
  short_prompts.prompt_tokens = 100;
  ServerSystem long_prompts = round_split(2, 1);
  long_prompts.prompt_tokens = 3000;
  ServerSystem short_answers = round_both(2);
  short_answers.output_tokens = 20;
  const Case cases[] = {{short_answers, "short answers"}, {round_both(1), "one server"},
                        {round_both(4), "four servers"},  {round_split(1, 1), "1 and 1"},
                        {round_split(2, 3), "2 and 3"},   {mixed, "two speeds"},
                        {short_prompts, "short prompts"}, {long_prompts, "long prompts"}};
  for (const Case& c : cases)
    for (const double part : {0.3, 0.6, 0.8}) {
      // Where half of the gaps are steps with prompts, the median is either.
      if (c.system.output_tokens < 100 && part > 0.7) continue;
      const ServerSpeed formula = speed_at(c.system, part * most_requests_per_second(c.system));
      const ServerSpeed played = simulated_speed(c.system, formula, 7);
      const auto near = [&](double ServerSpeed::*value, double bound, const char* what) {
        EXPECT_NEAR(played.*value / (formula.*value), 1, bound)
            << c.name << " at " << part << ": " << what << " " << formula.*value;
      };
      near(&ServerSpeed::first_token_seconds, 0.15, "first token");
      near(&ServerSpeed::p99_first_token_seconds, 0.4, "99 % of first tokens");
      near(&ServerSpeed::gap_seconds, 0.05, "gap");
      near(&ServerSpeed::p50_gap_seconds, 0.05, "half of the gaps");
      near(&ServerSpeed::p99_gap_seconds, 0.2, "99 % of the gaps");
      near(&ServerSpeed::tokens_per_second, 0.05, "tokens/s");
    }
}

// One server, written as a loop over its steps.
struct NaiveAnswers {
  std::vector<double> first;
  std::vector<double> gaps;
};
NaiveAnswers naive_server(const std::vector<double>& ready, const std::vector<double>& arrivals,
                          int n_prompt, int n_output, int chunk) {
  struct Answer {
    int left_prompt, left_output;
    double last = 0;
  };
  NaiveAnswers out;
  std::vector<Answer> all(ready.size(), {n_prompt, n_output});
  out.first.assign(ready.size(), 0);
  double now = 0;
  size_t n_done = 0;
  while (n_done < all.size()) {
    int n_decoding = 0, n_pieces = 0;
    std::vector<int> piece(all.size(), 0);
    for (size_t i = 0; i < all.size(); ++i)
      n_decoding += ready[i] <= now && all[i].left_prompt == 0 && all[i].left_output > 0;
    for (size_t i = 0; i < all.size(); ++i)
      if (ready[i] <= now && all[i].left_prompt > 0)
        n_pieces += piece[i] = std::min(all[i].left_prompt, chunk - n_decoding - n_pieces);
    if (n_decoding + n_pieces == 0) {
      double next = 1e9;
      for (const double time : ready)
        if (time > now) next = std::min(next, time);
      now = next;
      continue;
    }
    const double begun = now;
    now += round_step(n_decoding, n_pieces);
    for (size_t i = 0; i < all.size(); ++i) {
      Answer& a = all[i];
      const bool decodes = ready[i] <= begun && a.left_prompt == 0 && a.left_output > 0;
      if (!decodes && (piece[i] == 0 || (a.left_prompt -= piece[i]) > 0)) continue;
      if (decodes)
        out.gaps.push_back(now - a.last);
      else
        out.first[i] = now - arrivals[i];
      a.last = now;
      n_done += --a.left_output == 0;
    }
  }
  std::sort(out.gaps.begin(), out.gaps.end());
  return out;
}

void expect_same(const SimulatedAnswers& played, const NaiveAnswers& naive) {
  ASSERT_EQ(played.first_token_seconds.size(), naive.first.size());
  for (size_t i = 0; i < naive.first.size(); ++i)
    EXPECT_NEAR(played.first_token_seconds[i], naive.first[i], 1e-6) << i;
  ASSERT_EQ(played.gaps.size(), naive.gaps.size());
  for (size_t i = 0; i < naive.gaps.size(); ++i)
    ASSERT_NEAR(played.gaps[i], naive.gaps[i], 1e-6) << i;
}

TEST(Arrivals, OneServerIsALoopOverItsSteps) {
  ServerSystem s = round_both(1);
  s.prompt_tokens = 700;
  s.output_tokens = 30;
  const std::vector<double> arrivals = poisson_arrivals(3, 100, 5);
  expect_same(simulate_arrivals(s, arrivals), naive_server(arrivals, arrivals, 700, 30, 512));
}

// A prefill server is a queue of prompts. Keys of a chunk leave after it, one chunk at a time.
TEST(Arrivals, KeysTravelWhileLaterChunksAreComputed) {
  for (const double rate : {1e9, 15e6}) {
    ServerSystem s = round_split(1, 1);
    s.prompt_tokens = 64 * 16 + 10;  // two whole chunks of 512, and 10 tokens
    s.output_tokens = 20;
    s.network = {rate, 0.004};
    const std::vector<double> arrivals = poisson_arrivals(1, 60, 3);
    std::vector<double> ready;
    double free = 0, sent = 0;
    for (const double arrives : arrivals) {
      free = std::max(free, arrives);
      for (int i = 0; i < 2; ++i) {
        free += round_step(0, 512);
        sent = std::max(sent, free) + 512 * 10e3 / rate;
      }
      ready.push_back(sent + 2 * 0.004);
    }
    expect_same(simulate_arrivals(s, arrivals), naive_server(ready, arrivals, 10, 20, 512));
  }
}

TEST(Arrivals, TheRouterAndTheShortestQueueBalance) {
  // Three requests at once on three servers do not meet.
  ServerSystem s = round_both(3);
  s.prompt_tokens = 100;
  s.output_tokens = 10;
  SimulatedAnswers run = simulate_arrivals(s, {1, 1, 1});
  for (const double first : run.first_token_seconds) EXPECT_NEAR(first, round_step(0, 100), 1e-9);
  EXPECT_NEAR(run.gaps.back(), round_step(1, 0), 1e-9);
  EXPECT_NEAR(run.seconds, 1 + round_step(0, 100) + 9 * round_step(1, 0), 1e-9);
  // Nor do two prompts on two prefill servers.
  ServerSystem split = round_split(2, 2);
  run = simulate_arrivals(split, {1, 1});
  EXPECT_NEAR(run.first_token_seconds[0], run.first_token_seconds[1], 1e-9);
  // Sequences beyond the memory wait.
  ServerSystem small = round_both(1);
  small.prompt_tokens = 100;
  small.output_tokens = 10;
  small.groups[0].most_sequences = 1;
  run = simulate_arrivals(small, {1, 1});
  EXPECT_NEAR(run.first_token_seconds[1] - run.first_token_seconds[0],
              9 * round_step(1, 0) + round_step(0, 100), 1e-9);
}

TEST(Arrivals, ComeAtTheirRateAndOrder) {
  const std::vector<double> times = poisson_arrivals(5, 10000, 1);
  EXPECT_TRUE(std::is_sorted(times.begin(), times.end()));
  EXPECT_NEAR(times.back(), 2000, 60);
  EXPECT_EQ(poisson_arrivals(5, 10000, 1), times) << "the seed decides";
  EXPECT_NE(poisson_arrivals(5, 10000, 2), times);
  EXPECT_EQ(percentile({1, 2, 3, 4, 5}, 0.5), 3);
  EXPECT_EQ(percentile({}, 0.5), 0);
  EXPECT_TRUE(says(error_of([] { simulate_arrivals(round_both(1), {}); }), "no requests"));
  EXPECT_TRUE(says(error_of([] {
                     ServerSystem s = round_both(1);
                     s.output_tokens = 1 << 24;
                     simulate_arrivals(s, poisson_arrivals(1, 100, 1));
                   }),
                   "tokens of requests"));
}

}  // namespace
}  // namespace tandem
