#include "scheduling/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "core/check.h"
#include "tests/error_of.h"

namespace tandem {
namespace {

const std::vector<float> kLogits = {1.0f, 3.0f, 2.0f, 0.0f, 2.5f, -1.0f};
constexpr int kVocab = 6;
const Vocabulary kAll{kVocab};

SamplingParams plain(float temperature = 1) {
  SamplingParams p;
  p.temperature = temperature;
  p.top_p = 1;
  return p;
}

Sampled next(Sampler& sampler, std::vector<float> logits = kLogits) { return sampler.next(logits); }

std::vector<int32_t> draw(const SamplingParams& params, int n, std::vector<int32_t> prompt = {},
                          const Vocabulary& vocabulary = kAll) {
  Sampler sampler(params, vocabulary, prompt);
  std::vector<int32_t> tokens;
  for (int i = 0; i < n; ++i) tokens.push_back(next(sampler).token);
  return tokens;
}

// The share of each token in n draws.
std::vector<double> frequencies(const SamplingParams& params, int n = 40000) {
  std::vector<double> share(kVocab);
  for (const int32_t t : draw(params, n)) share[t] += 1.0 / n;
  return share;
}

std::vector<double> softmax(double temperature, const std::vector<int>& allowed) {
  std::vector<double> p(kVocab);
  double sum = 0;
  for (const int t : allowed) sum += p[t] = std::exp(kLogits[t] / temperature);
  for (double& v : p) v /= sum;
  return p;
}

void expect_distribution(const SamplingParams& params, const std::vector<double>& want) {
  const std::vector<double> got = frequencies(params);
  for (int t = 0; t < kVocab; ++t) {
    EXPECT_NEAR(got[t], want[t], 0.012) << "token " << t;
    if (want[t] == 0) {
      EXPECT_EQ(got[t], 0) << "token " << t << " is not allowed";
    }
  }
}

TEST(Sampler, GreedyTakesTheLargestAndTheLowerOfEquals) {
  Sampler sampler(plain(0), kAll, {});
  EXPECT_EQ(next(sampler).token, 1);
  EXPECT_EQ(next(sampler, {0, 5, 1, 5, 5, 0}).token, 1);
}

TEST(Sampler, DrawsFromTheSoftmaxAtTheTemperature) {
  expect_distribution(plain(1), softmax(1, {0, 1, 2, 3, 4, 5}));
  expect_distribution(plain(0.5f), softmax(0.5, {0, 1, 2, 3, 4, 5}));
  expect_distribution(plain(3), softmax(3, {0, 1, 2, 3, 4, 5}));
}

TEST(Sampler, TopK) {
  SamplingParams p = plain();
  p.top_k = 2;
  expect_distribution(p, softmax(1, {1, 4}));
  p.top_k = 100;
  expect_distribution(p, softmax(1, {0, 1, 2, 3, 4, 5}));
}

// Probabilities: 1: 0.459, 4: 0.278 (together 0.738), 2: 0.169, 0: 0.062, 3: 0.023, 5: 0.008.
TEST(Sampler, TopPKeepsTheSmallestSetThatReachesIt) {
  SamplingParams p = plain();
  p.top_p = 0.73f;
  expect_distribution(p, softmax(1, {1, 4}));
  p.top_p = 0.75f;
  expect_distribution(p, softmax(1, {1, 4, 2}));
  p.top_p = 1e-6f;
  expect_distribution(p, softmax(1, {1}));
}

TEST(Sampler, TopPSortsNoMoreThanItMust) {
  std::vector<float> flat(5000, 0.f);
  SamplingParams p = plain();
  p.top_p = 0.5f;
  const Vocabulary large{5000};
  Sampler sampler(p, large, {});
  for (int i = 0; i < 200; ++i)
    EXPECT_LT(next(sampler, flat).token, 2500);  // of equal logits the lower tokens are kept
}

TEST(Sampler, MinP) {
  SamplingParams p = plain();
  p.min_p = 0.35f;  // relative to the most likely token: keeps 4 and 2 (0.368)
  expect_distribution(p, softmax(1, {1, 4, 2}));
}

TEST(Sampler, TopKThenTopPRenormalises) {
  SamplingParams p = plain();
  p.top_k = 3;
  p.top_p = 0.6f;  // of the three remaining tokens 1 has 0.506, 1 and 4 together have 0.81
  expect_distribution(p, softmax(1, {1, 4}));
}

TEST(Sampler, RepetitionPenaltyCountsThePrompt) {
  SamplingParams p = plain(0);
  p.repetition_penalty = 2;
  EXPECT_EQ(draw(p, 3, {1}), (std::vector<int32_t>{4, 2, 1}));  // 3/2 is more than 2.5/2 and 2/2
  Sampler sampler(p, kAll, std::vector<int32_t>{1, 0});
  EXPECT_EQ(next(sampler, {-1, -1.1f, -1.9f, -5, -5, -5}).token, 2)
      << "negative logits are multiplied";
}

TEST(Sampler, PresenceAndFrequencyPenaltiesCountOnlyOutput) {
  SamplingParams p = plain(0);
  p.presence_penalty = 0.6f;
  EXPECT_EQ(draw(p, 4, {1}), (std::vector<int32_t>{1, 4, 1, 1}));  // 2.4 is less than 2.5, then 1.9
  p.presence_penalty = 0;
  p.frequency_penalty = 0.3f;
  EXPECT_EQ(draw(p, 4, {1}), (std::vector<int32_t>{1, 1, 4, 1}));
}

TEST(Sampler, LogitBias) {
  SamplingParams p = plain(0);
  p.logit_bias = {{3, 10.f}};
  EXPECT_EQ(draw(p, 1)[0], 3);
  p = plain();
  p.logit_bias = {{1, -100.f}};
  expect_distribution(p, softmax(1, {0, 2, 3, 4, 5}));
}

TEST(Sampler, SeedDecidesTheText) {
  SamplingParams p = plain();
  p.seed = 42;
  const auto first = draw(p, 100);
  EXPECT_EQ(draw(p, 100), first);
  p.seed = 43;
  EXPECT_NE(draw(p, 100), first);
}

// Drawn in Python with SplitMix64: floor(64 * mix(mix(seed) + i) / 2^64).
TEST(Sampler, NumbersOfASeedAreThoseOfSplitMix64) {
  const std::pair<uint64_t, std::vector<int32_t>> cases[] = {
      {0, {41, 10, 32, 62, 23, 3, 61, 4, 34, 62, 37, 34}},
      {42, {21, 62, 28, 26, 36, 52, 59, 63, 60, 37, 43, 0}}};
  for (const auto& [seed, want] : cases) {
    SamplingParams p = plain();
    p.seed = seed;
    Sampler sampler(p, Vocabulary{64}, {});
    std::vector<int32_t> drawn;
    for (size_t i = 0; i < want.size(); ++i)
      drawn.push_back(next(sampler, std::vector<float>(64, 1.f)).token);
    EXPECT_EQ(drawn, want) << seed;
  }
}

TEST(Sampler, LogprobsAreTheModelsOwn) {
  SamplingParams p = plain(0);
  p.n_top_logprobs = 3;
  p.logit_bias = {{3, 10.f}};
  Sampler sampler(p, kAll, {});
  const Sampled s = next(sampler);
  double sum = 0;
  for (const float v : kLogits) sum += std::exp(v);
  EXPECT_EQ(s.token, 3);
  EXPECT_NEAR(s.logprob, 0 - std::log(sum), 1e-6);
  ASSERT_EQ(s.top.size(), 3u);
  EXPECT_EQ(s.top[0].token, 1);
  EXPECT_EQ(s.top[1].token, 4);
  EXPECT_EQ(s.top[2].token, 2);
  EXPECT_NEAR(s.top[1].logprob, 2.5 - std::log(sum), 1e-6);
}

TEST(Sampler, HolesAreNeverDrawn) {
  const Vocabulary holes{kVocab, {1, 4, 5}};
  SamplingParams p = plain(0);
  p.logit_bias = {{1, 100.f}};
  p.repetition_penalty = 2;
  EXPECT_EQ(draw(p, 1, {1}, holes)[0], 2);
  const auto only = [&](const SamplingParams& params, const std::vector<int32_t>& allowed) {
    std::vector<int> n(kVocab);
    for (const int32_t t : draw(params, 2000, {}, holes)) ++n[t];
    for (int t = 0; t < kVocab; ++t)
      EXPECT_EQ(n[t] > 0, std::find(allowed.begin(), allowed.end(), t) != allowed.end()) << t;
  };
  p = plain(1e30f);  // a uniform distribution
  only(p, {0, 2, 3});
  p.top_p = 0.999f;
  only(p, {0, 2, 3});
  p.min_p = 1e-30f;
  only(p, {0, 2, 3});
  p = plain();
  p.top_k = 2;
  only(p, {0, 2});
  p.top_k = 4;  // more than the number of tokens
  only(p, {0, 2, 3});
}

TEST(Sampler, ExtremePenaltiesLeaveSomethingToDraw) {
  SamplingParams p = plain();
  p.repetition_penalty = 3e38f;
  Sampler sampler(p, kAll, std::vector<int32_t>{0, 1, 2, 3, 4, 5});
  for (int i = 0; i < 20; ++i) {
    const int32_t token = next(sampler, {-20, -30, -40, -50, -60, -70}).token;
    EXPECT_TRUE(token >= 0 && token < kVocab) << token;
  }
}

TEST(Sampler, HolesHaveNoProbability) {
  SamplingParams p = plain(0);
  p.n_top_logprobs = kVocab;
  const Vocabulary holes{kVocab, {1, 4, 5}};
  Sampler sampler(p, holes, {});
  const Sampled s = next(sampler);
  ASSERT_EQ(s.top.size(), 3u);
  double sum = 0;
  for (const TokenLogprob& t : s.top) sum += std::exp(t.logprob);
  EXPECT_NEAR(sum, 1, 1e-6);
  EXPECT_EQ(s.top[0].token, 2);
}

TEST(Sampler, TokensAreHeldBackAtFirst) {
  SamplingParams p = plain(0);
  p.min_new_tokens = 2;
  p.held_back = {1, 4, 99, -1};  // ids outside the vocabulary are ignored
  EXPECT_EQ(draw(p, 4), (std::vector<int32_t>{2, 2, 1, 1}));
}

// A device may draw a token where nothing changes the logits. Its draws count.
TEST(Sampler, TellsADeviceHowToDraw) {
  SamplingParams p = plain(0.7f);
  p.top_p = 0.9f;
  p.top_k = 5;
  p.min_p = 0.1f;
  p.seed = 42;
  p.min_new_tokens = 2;
  p.held_back = {1};
  Sampler sampler(p, kAll, {});
  for (int i = 0; i < 2; ++i) {
    EXPECT_FALSE(sampler.next_draw(3)) << "tokens are held back";
    sampler.drew(2);
  }
  for (const int64_t n : {2, 3}) {
    const std::optional<Draw> draw = sampler.next_draw(3);
    ASSERT_TRUE(draw);
    EXPECT_EQ(draw->row, 3);
    EXPECT_EQ(draw->temperature, 0.7f);
    EXPECT_EQ(draw->top_p, 0.9f);
    EXPECT_EQ(draw->min_p, 0.1f);
    EXPECT_EQ(draw->top_k, 5);
    EXPECT_EQ(draw->uniform, Sampler::uniform(42, n));
    EXPECT_EQ(sampler.drew(4).token, 4);
  }
  EXPECT_THROW(sampler.drew(-1), Error) << "a logit was not finite";
  const auto draws = [](auto change) {
    SamplingParams params = plain();
    change(params);
    return Sampler(params, kAll, {}).next_draw(0).has_value();
  };
  EXPECT_TRUE(draws([](auto&) {}));
  EXPECT_FALSE(draws([](auto& params) { params.logit_bias = {{1, 1.f}}; }));
  EXPECT_FALSE(draws([](auto& params) { params.repetition_penalty = 2; }));
  EXPECT_FALSE(draws([](auto& params) { params.presence_penalty = 1; }));
  EXPECT_FALSE(draws([](auto& params) { params.frequency_penalty = 1; }));
  EXPECT_FALSE(draws([](auto& params) { params.n_top_logprobs = 0; }));
  EXPECT_FALSE(draws([](auto& params) { params.min_new_tokens = 1; }));
}

TEST(Sampler, LogitsThatAreNotFiniteAreAnError) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    Sampler sampler(plain(), kAll, {});
    EXPECT_THROW(next(sampler, {0, 1, bad, 0, 0, 0}), Error);
  }
}

// Among equal logits a limit keeps the lower tokens, and exactly as many as it allows.
TEST(Sampler, LimitsAmongEquals) {
  const auto drawn = [](const SamplingParams& params, const std::vector<float>& logits) {
    Sampler sampler(params, kAll, {});
    std::vector<int> seen(kVocab);
    for (int i = 0; i < 400; ++i) seen[next(sampler, logits).token] = 1;
    return seen;
  };
  using Seen = std::vector<int>;
  const std::vector<float> four = {0, 0, -200, 0, -200, 0};
  SamplingParams p = plain();
  EXPECT_EQ(drawn(p, four), (Seen{1, 1, 0, 1, 0, 1}));
  p.top_p = 0.5f;
  EXPECT_EQ(drawn(p, four), (Seen{1, 1, 0, 0, 0, 0})) << "exactly half";
  p.top_p = 0.51f;
  EXPECT_EQ(drawn(p, four), (Seen{1, 1, 0, 1, 0, 0}));
  p = plain();
  p.top_k = 3;
  EXPECT_EQ(drawn(p, four), (Seen{1, 1, 0, 1, 0, 0}));
  p.top_k = 1;
  EXPECT_EQ(drawn(p, four), (Seen{1, 0, 0, 0, 0, 0}));
  p = plain();
  p.min_p = 1;
  EXPECT_EQ(drawn(p, four), (Seen{1, 1, 0, 1, 0, 1})) << "as likely as the likeliest";
  p = plain(0);
  p.n_top_logprobs = 3;
  Sampler sampler(p, kAll, {});
  const Sampled s = next(sampler, four);
  EXPECT_EQ(s.top[0].token, 0);
  EXPECT_EQ(s.top[1].token, 1);
  EXPECT_EQ(s.top[2].token, 3);
}

TEST(Sampler, RangesAreClosed) {
  const auto refusal = [](auto change) {
    SamplingParams p = plain();
    change(p);
    return error_of([&] { validate(p, kAll); });
  };
  const std::string none = "no error";
  EXPECT_EQ(refusal([](auto& p) { p.temperature = 0; }), none);
  EXPECT_EQ(refusal([](auto& p) { p.temperature = -0.5f; }),
            "temperature -0.5: must be 0 (greedy) or more");
  EXPECT_EQ(refusal([](auto& p) { p.top_p = 1; }), none);
  EXPECT_EQ(refusal([](auto& p) { p.top_p = 1e-6f; }), none);
  EXPECT_EQ(refusal([](auto& p) { p.top_p = 1.5f; }), "top-p 1.5: must be above 0 and at most 1");
  EXPECT_EQ(refusal([](auto& p) { p.top_k = -1; }), "top-k -1: must be 0 (off) or more");
  EXPECT_EQ(refusal([](auto& p) { p.min_p = 1; }), none);
  EXPECT_EQ(refusal([](auto& p) { p.min_p = -0.5f; }), "min-p -0.5: must be between 0 and 1");
  EXPECT_EQ(refusal([](auto& p) { p.repetition_penalty = 1e-6f; }), none);
  EXPECT_EQ(refusal([](auto& p) { p.repetition_penalty = 0; }),
            "repetition penalty 0: must be above 0");
  EXPECT_EQ(refusal([](auto& p) { p.presence_penalty = 2, p.frequency_penalty = -2; }), none);
  EXPECT_EQ(refusal([](auto& p) { p.presence_penalty = -2, p.frequency_penalty = 2.5f; }),
            "presence penalty -2, frequency penalty 2.5: must be between -2 and 2");
  EXPECT_EQ(refusal([](auto& p) { p.presence_penalty = -2.5f; }),
            "presence penalty -2.5, frequency penalty 0: must be between -2 and 2");
  EXPECT_EQ(refusal([](auto& p) { p.n_top_logprobs = -1; }), none);
  EXPECT_EQ(refusal([](auto& p) { p.n_top_logprobs = kVocab; }), none);
  EXPECT_EQ(refusal([](auto& p) { p.n_top_logprobs = kVocab + 1; }),
            "7 log-probabilities requested: the vocabulary has 6 tokens");
  EXPECT_EQ(refusal([](auto& p) { p.logit_bias = {{0, -1.f}, {5, 1.f}}; }), none);
  EXPECT_EQ(refusal([](auto& p) {
              p.logit_bias = {{6, 1.5f}};
            }),
            "logit bias 1.5 of token 6: tokens are 0 to 5");
  EXPECT_EQ(refusal([](auto& p) {
              p.logit_bias = {{-1, 2}};
            }),
            "logit bias 2 of token -1: tokens are 0 to 5");
  EXPECT_EQ(refusal([](auto& p) {
              p.logit_bias = {{3, std::numeric_limits<float>::infinity()}};
            }),
            "logit bias inf of token 3: tokens are 0 to 5");
}

TEST(Sampler, ParametersOutOfRangeAreNamed) {
  const auto bad = [](auto change) {
    SamplingParams p = plain();
    change(p);
    EXPECT_THROW(validate(p, kAll), Error);
  };
  bad([](auto& p) { p.temperature = -1; });
  bad([](auto& p) { p.temperature = std::numeric_limits<float>::quiet_NaN(); });
  bad([](auto& p) { p.top_p = 0; });
  bad([](auto& p) { p.top_p = 1.5f; });
  bad([](auto& p) { p.top_k = -1; });
  bad([](auto& p) { p.min_p = 2; });
  bad([](auto& p) { p.repetition_penalty = 0; });
  bad([](auto& p) { p.presence_penalty = 3; });
  bad([](auto& p) { p.n_top_logprobs = 7; });
  bad([](auto& p) { p.n_top_logprobs = -2; });
  bad([](auto& p) { p.logit_bias = {{6, 1.f}}; });
  validate(plain(), kAll);
  // If several are out of range, the message names the first.
  SamplingParams p = plain();
  p.presence_penalty = 3;
  p.n_top_logprobs = -2;
  EXPECT_TRUE(says(error_of([&] { validate(p, kAll); }), "presence penalty 3"));
}

}  // namespace
}  // namespace tandem
