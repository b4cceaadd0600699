// Choices and weights computed by hand for the routers of DeepSeek-V2 (arXiv 2405.04434, section
// 2.2) and DeepSeek-V3 (arXiv 2412.19437, section 2.1.2; both in MoEGate of modeling_deepseek.py),
// and random routers against a sort.
#include "ops/router.h"

#include <algorithm>
#include <random>

#include "tests/check_close.h"
#include "tests/error_of.h"

namespace tandem {
namespace {

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Routed route(const std::vector<float>& logits, const std::vector<float>& bias,
             const RouterConfig& router) {
  const size_t n = router.n_experts;
  std::vector<float> score(n), choice(n), groups(router.n_groups);
  Routed out{std::vector<int32_t>(router.n_active), std::vector<float>(router.n_active)};
  route_token(logits, bias, router, {score, choice, groups}, out.ids, out.weights);
  return out;
}

RouterConfig v3() {
  return {.n_experts = 8, .n_active = 3, .n_groups = 4, .n_active_groups = 2, .scale = 2.5f};
}

RouterConfig v2(TopkMethod method, float scale) {
  RouterConfig r = v3();
  r.scoring = Scoring::kSoftmax;
  r.method = method;
  r.normalize = r.scale_normalized = false;
  r.scale = scale;
  return r;
}

const std::vector<float> kLogits = {0.2f, -0.5f, 1.3f, -2.0f, 0.9f, 0.4f, -1.1f, 2.2f};

TEST(Router, GroupsByTheSumOfTheBestTwoBiasedScores) {
  const Routed r = route(kLogits, {0.10f, 0.40f, -0.30f, 0.05f, 0.00f, 0.20f, 0.15f, -0.10f}, v3());
  EXPECT_EQ(r.ids, (std::vector<int32_t>{5, 1, 4}));
  test::expect_close(r.weights, std::vector{0.887114045, 0.559426312, 1.053459643}, 1e-6);
}

TEST(Router, NegativeScoresDoNotLoseToMaskedOnes) {
  const Routed r = route({-1, -2, -.5f, -3, 0, -4, -2.5f, -1.5f},
                         {-.6f, -.7f, -.8f, -.6f, -.9f, -.7f, -.75f, -.65f}, v3());
  EXPECT_EQ(r.ids, (std::vector<int32_t>{0, 2, 3}));
  test::expect_close(r.weights, std::vector{0.968937653, 1.360197205, 0.170865142}, 1e-6);
}

TEST(Router, V2GroupsByTheBestExpert) {
  const Routed r = route(kLogits, {}, v2(TopkMethod::kGroupLimitedGreedy, 16));
  EXPECT_EQ(r.ids, (std::vector<int32_t>{7, 2, 6}));
  test::expect_close(r.weights, std::vector{7.623331637, 3.099415350, 0.281172617}, 3e-6);
}

TEST(Router, V2LiteIsGreedyOverAll) {
  const Routed r = route(kLogits, {}, v2(TopkMethod::kGreedy, 1));
  EXPECT_EQ(r.ids, (std::vector<int32_t>{7, 2, 4}));
  test::expect_close(r.weights, std::vector{0.476458227, 0.193713459, 0.129850015}, 1e-6);
}

TEST(Router, V2ScalesOnlyWhatIsNotRenormalised) {
  RouterConfig r = v2(TopkMethod::kGreedy, 16);
  r.normalize = true;
  const Routed renormalised = route(kLogits, {}, r);
  EXPECT_NEAR(renormalised.weights[0] + renormalised.weights[1] + renormalised.weights[2], 1, 1e-6);
}

TEST(Router, TiesGoToTheLowerIndex) {
  const Routed r = route(std::vector<float>(8, 0.f), std::vector<float>(8, 0.f), v3());
  EXPECT_EQ(r.ids, (std::vector<int32_t>{0, 1, 2}));
  test::expect_close(r.weights, std::vector(3, 0.833333333), 1e-6);
}

TEST(Router, OneExpertIsNotRenormalised) {
  RouterConfig r = v3();
  r.n_active = 1;
  const Routed one = route(kLogits, std::vector<float>(8, 0.f), r);
  EXPECT_EQ(one.ids[0], 7);
  EXPECT_NEAR(one.weights[0], 2.5 * 0.900249511, 1e-6);
}

// Covers groups of one expert and R1's configuration.
TEST(Router, RandomRoutersMatchASort) {
  std::mt19937 rng(5);
  std::normal_distribution<float> normal;
  for (const RouterConfig& r :
       {RouterConfig{},
        RouterConfig{.n_experts = 8, .n_active = 2, .n_groups = 8, .n_active_groups = 3},
        RouterConfig{.n_experts = 384, .n_active = 8, .n_groups = 1, .n_active_groups = 1}}) {
    for (int round = 0; round < 50; ++round) {
      std::vector<float> logits(r.n_experts), bias(r.n_experts);
      for (int e = 0; e < r.n_experts; ++e) logits[e] = normal(rng), bias[e] = normal(rng);
      std::vector<std::pair<double, int>> groups, experts;
      const int size = r.n_experts / r.n_groups;
      const auto biased = [&](int e) { return 1 / (1 + std::exp(-logits[e])) + bias[e]; };
      for (int g = 0; g < r.n_groups; ++g) {
        std::vector<double> members;
        for (int e = g * size; e < (g + 1) * size; ++e) members.push_back(biased(e));
        std::sort(members.rbegin(), members.rend());
        groups.push_back({-members[0] - (size > 1 ? members[1] : 0), g});
      }
      std::sort(groups.begin(), groups.end());
      for (int g = 0; g < r.n_active_groups; ++g)
        for (int e = groups[g].second * size; e < (groups[g].second + 1) * size; ++e)
          experts.push_back({-biased(e), e});
      std::sort(experts.begin(), experts.end());
      const Routed got = route(logits, bias, r);
      double total = 0;
      for (const float w : got.weights) total += w;
      EXPECT_NEAR(total, 2.5, 1e-5);
      for (int k = 0; k < r.n_active; ++k) ASSERT_EQ(got.ids[k], experts[k].second);
    }
  }
}

}  // namespace
}  // namespace tandem
