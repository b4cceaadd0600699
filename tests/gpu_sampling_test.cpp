// Tokens sampled on the GPU against the host's sampler.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "gpu_kernels/sampling.h"
#include "scheduling/sampler.h"
#include "tests/gpu_memory.h"

namespace tandem::gpu {
namespace {

struct SampledRow {
  SamplingParams params;
  std::vector<float> logits;
};

SamplingParams params_of(float temperature, float top_p = 1, uint64_t seed = 0) {
  SamplingParams p;
  p.temperature = temperature;
  p.top_p = top_p;
  p.seed = seed;
  return p;
}

// The tokens of all cases, sampled in one launch; each is the first draw of its seed, or uses
// `uniform`.
std::vector<int32_t> drawn(const std::vector<SampledRow>& cases, const Vocabulary& vocabulary,
                           std::optional<double> uniform = {}) {
  const auto n = static_cast<int64_t>(cases.size()), vocab = int64_t{vocabulary.size};
  const int64_t stride = vocab + 3;
  std::vector<float> logits(n * stride, NAN);
  std::vector<uint32_t> allowed((vocab + 31) / 32, ~0u);
  for (const int32_t hole : vocabulary.holes) allowed[hole / 32] &= ~(1u << hole % 32);
  const Buffer rows(n * int64_t{sizeof(DrawRow)}, Site::kMapped), tokens(n * 4, Site::kMapped);
  for (int64_t i = 0; i < n; ++i) {
    const SamplingParams& p = cases[i].params;
    std::copy(cases[i].logits.begin(), cases[i].logits.end(), logits.begin() + i * stride);
    rows.as<DrawRow>()[i] = {.row = static_cast<int32_t>(i),
                             .temperature = p.temperature,
                             .top_p = p.top_p,
                             .min_p = p.min_p,
                             .top_k = p.top_k,
                             .uniform = uniform.value_or(Sampler::uniform(p.seed, 0))};
  }
  Stream stream;
  const Buffer there = on_gpu(stream, logits), mask = on_gpu(stream, allowed);
  draw(stream, {.logits = {there.as<float>(), stride},
                .how = rows.as<DrawRow>(),
                .allowed = mask.as<uint32_t>(),
                .tokens = tokens.as<int32_t>(),
                .n = static_cast<int>(n),
                .vocab = vocabulary.size});
  stream.wait();
  return {tokens.as<int32_t>(), tokens.as<int32_t>() + n};
}

int32_t drawn_by_host(SampledRow c, const Vocabulary& vocabulary) {
  return Sampler(c.params, vocabulary, {}).next(c.logits).token;
}

// Logits of which some are equal and some much smaller than the others.
std::vector<float> random_logits(std::mt19937& rng, int vocab) {
  std::vector<float> logits(vocab);
  std::normal_distribution<float> normal(0, 1 + static_cast<float>(rng() % 5));
  const bool coarse = rng() % 3 == 0;
  for (float& v : logits) v = coarse ? std::round(normal(rng)) : normal(rng);
  if (rng() % 4 == 0) logits[rng() % vocab] += 30;
  if (rng() % 4 == 0) std::fill(logits.begin(), logits.end(), -2.5f);
  return logits;
}

SamplingParams random_params(std::mt19937& rng, int vocab) {
  const auto any = [&](std::initializer_list<float> of) { return of.begin()[rng() % of.size()]; };
  SamplingParams p;
  p.temperature = any({0, 0.2f, 0.6f, 1, 3});
  p.top_p = any({1, 0.95f, 0.5f, 0.01f, 0.999f});
  p.min_p = any({0, 0, 0.05f, 1});
  p.top_k = rng() % 2 ? 0 : 1 + static_cast<int>(rng() % (vocab + 2));
  p.seed = rng();
  return p;
}

TEST(Sampling, DrawsWhatTheHostDraws) {
  std::mt19937 rng(7);
  int n = 0, n_other = 0;
  for (const int vocab : {1, 2, 31, 33, 128, 1000, 5003}) {
    Vocabulary vocabulary = {.size = vocab};
    for (int i = 0; i < vocab / 10; ++i) vocabulary.holes.push_back(rng() % vocab);
    std::vector<SampledRow> cases(60);
    for (SampledRow& c : cases) c = {random_params(rng, vocab), random_logits(rng, vocab)};
    const std::vector<int32_t> got = drawn(cases, vocabulary);
    for (size_t i = 0; i < cases.size(); ++i) {
      const int32_t want = drawn_by_host(cases[i], vocabulary);
      ++n;
      n_other += got[i] != want;
      const SamplingParams& p = cases[i].params;
      if (open_gpu().emulated || p.temperature == 0) {  // both use the same exponential
        EXPECT_EQ(got[i], want) << vocab << " tokens, temperature " << p.temperature << ", top-p "
                                << p.top_p << ", top-k " << p.top_k << ", min-p " << p.min_p;
      }
    }
  }
  EXPECT_LE(n_other, n / 100);
}

// A vocabulary as large as R1's, with likely tokens anywhere.
TEST(Sampling, DrawsFromALargeVocabulary) {
  std::mt19937 rng(3);
  const Vocabulary vocabulary = {.size = 129280};
  std::vector<SampledRow> cases(4);
  for (SampledRow& c : cases) {
    c = {params_of(0.6f, 0.95f, rng()), random_logits(rng, vocabulary.size)};
  }
  cases[1].params.top_k = 50;
  cases[2].params.temperature = 0;
  const std::vector<int32_t> got = drawn(cases, vocabulary);
  for (size_t i = 0; i < cases.size(); ++i)
    EXPECT_EQ(got[i], drawn_by_host(cases[i], vocabulary)) << i;
}

// One token has 97 % of the probability. The filters end, and the tokens drawn are, among thousands
// that have less than 2^-16 of its weight each, some of them equal.
TEST(Sampling, FiltersEndAmongUnlikelyTokens) {
  if (!open_gpu().emulated) GTEST_SKIP() << "its exponential is not the host's";
  std::mt19937 rng(9);
  const Vocabulary vocabulary = {.size = 7000};
  std::vector<SampledRow> cases;
  std::set<int32_t> tokens;
  for (const bool coarse : {false, true})
    for (const float top_p : {0.98f, 0.99f, 0.999f, 1.f})
      for (const int top_k : {0, 2, 3000, 6999}) {
        uint64_t seed = rng();
        while (Sampler::uniform(seed, 0) < 0.975) ++seed;
        SampledRow c = {params_of(1, top_p, seed), std::vector<float>(vocabulary.size)};
        std::normal_distribution<float> normal(-12.5f, 0.7f);
        for (float& v : c.logits) v = coarse ? std::round(normal(rng)) : normal(rng);
        c.logits[rng() % vocabulary.size] = 0;
        c.params.top_k = top_k;
        cases.push_back(c);
      }
  const std::vector<int32_t> got = drawn(cases, vocabulary);
  for (size_t i = 0; i < cases.size(); ++i) {
    const SamplingParams& p = cases[i].params;
    EXPECT_EQ(got[i], drawn_by_host(cases[i], vocabulary))
        << "top-p " << p.top_p << ", top-k " << p.top_k;
    tokens.insert(got[i]);
  }
  EXPECT_GT(tokens.size(), cases.size() / 2);
}

// Thousands of tokens in a few bins of the first histogram, so that both filters end within a bin:
// top-p must not keep tokens that top-k does not. The largest uniform number draws the last token
// that is kept.
TEST(Sampling, TopPKeepsNoMoreThanTopK) {
  if (!open_gpu().emulated) GTEST_SKIP() << "its exponential is not the host's";
  constexpr int kVocab = 3000, kLikely = 40;
  std::vector<float> logits(kVocab);
  for (int t = 0; t < kVocab; ++t) logits[t] = -1e-7f * static_cast<float>(t * 7 % kVocab);
  std::vector<int32_t> order(kVocab);  // of the weights, of which many are equal
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return std::exp(logits[a]) > std::exp(logits[b]); });
  std::vector<SampledRow> cases;
  std::vector<int32_t> want;
  for (int k = 1; k <= kLikely; ++k) {
    const float half_of_last = static_cast<float>(k) - 0.5f;
    const auto add = [&](float top_p, int top_k) {
      cases.push_back({params_of(1, top_p), logits});
      cases.back().params.top_k = top_k;
      want.push_back(*std::max_element(order.begin(), order.begin() + k));
    };
    add(1, k);
    add(half_of_last / kVocab, 0);
    add(half_of_last / kLikely, kLikely);
    add(1 - 0.5f / kVocab, k);
  }
  const std::vector<int32_t> got = drawn(cases, {.size = kVocab}, 1 - 0x1p-53);
  for (size_t i = 0; i < cases.size(); ++i)
    EXPECT_EQ(got[i], want[i]) << "top-k " << cases[i].params.top_k << ", top-p "
                               << cases[i].params.top_p;
}

// Compares the frequencies of many draws with the probabilities.
TEST(Sampling, FrequenciesAreTheProbabilities) {
  constexpr int kDraws = 1000;
  const std::vector<float> logits = {0, std::log(2.0f), std::log(5.0f), std::log(0.01f)};
  std::vector<SampledRow> cases;
  for (uint64_t seed = 0; seed < kDraws; ++seed)
    cases.push_back({params_of(1, 0.99f, seed), logits});
  std::vector<double> part(4);
  for (const int32_t token : drawn(cases, {.size = 4})) part[token] += 1.0 / kDraws;
  EXPECT_NEAR(part[0], 1.0 / 8, 0.05);
  EXPECT_NEAR(part[1], 2.0 / 8, 0.05);
  EXPECT_NEAR(part[2], 5.0 / 8, 0.05);
  EXPECT_EQ(part[3], 0);
}

// Tokens with weight 0 are never drawn, for any uniform number.
TEST(Sampling, TheEndsOfTheRangeDrawPossibleTokens) {
  std::vector<float> logits(100, -1e6f);
  logits[40] = logits[70] = 1;
  const std::vector<SampledRow> cases = {{params_of(1), logits}};
  EXPECT_EQ(drawn(cases, {.size = 100}, 0.0)[0], 40);
  EXPECT_EQ(drawn(cases, {.size = 100}, 1 - 0x1p-53)[0], 70);
}

TEST(Sampling, NonFiniteLogitsAreReported) {
  std::vector<SampledRow> cases(4, {params_of(0.5f), std::vector<float>(100, 1)});
  cases[0].logits[99] = NAN;
  cases[1].logits[5] = INFINITY;
  cases[2].logits[0] = -INFINITY;
  cases[2].params.temperature = 0;
  const std::vector<int32_t> got = drawn(cases, {.size = 100});
  for (int i = 0; i < 3; ++i) EXPECT_EQ(got[i], kNotFinite);
  EXPECT_GE(got[3], 0);
}

}  // namespace
}  // namespace tandem::gpu
