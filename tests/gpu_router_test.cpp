// The router on the GPU chooses as route_token() does, for random logits, biases and groups.
#include <gtest/gtest.h>

#include <random>

#include "ops/router.h"
#include "tests/gpu_memory.h"

namespace tandem::gpu {
namespace {

constexpr int kTokens = 9;

struct Case {
  RouterConfig router;
  bool ties;  // logits with few different values
};

GroupScore group_score(const RouterConfig& r) {
  if (r.method == TopkMethod::kGreedy || r.n_groups == 1) return GroupScore::kNone;
  return r.method == TopkMethod::kNoauxTc ? GroupScore::kSumOfBestTwo : GroupScore::kBest;
}

void expect_same_choice(const Case& c, std::mt19937& rng) {
  const RouterConfig& r = c.router;
  const size_t n = r.n_experts, k = r.n_active;
  std::normal_distribution<float> normal;
  std::vector<float> logits(kTokens * (n + 1)), bias(n);
  for (float& v : logits) v = c.ties ? std::round(normal(rng)) : normal(rng);
  for (float& v : bias) v = c.ties ? 0 : 0.1f * normal(rng);

  Stream stream;
  const Buffer dlogits = on_gpu(stream, logits), dbias = on_gpu(stream, bias),
               ids = nans_on_gpu<int32_t>(kTokens * r.n_active),
               weights = nans_on_gpu<float>(kTokens * r.n_active);
  route(stream, {.logits = {dlogits.as<float>(), r.n_experts + 1},
                 .bias = r.has_bias() ? dbias.as<float>() : nullptr,
                 .weights = {weights.as<float>(), r.n_active},
                 .ids = ids.as<int32_t>(),
                 .ids_stride = r.n_active,
                 .tokens = kTokens,
                 .n_experts = r.n_experts,
                 .n_active = r.n_active,
                 .n_groups = r.n_groups,
                 .n_active_groups = r.n_active_groups,
                 .scoring = r.scoring == Scoring::kSoftmax ? RouterScoring::kSoftmax
                                                           : RouterScoring::kSigmoid,
                 .group_score = group_score(r),
                 .normalize = r.normalize,
                 .scale = r.scale,
                 .simulated_ranks = r.simulated_ranks});
  const auto got_ids = from_gpu<int32_t>(stream, ids);
  const auto got_weights = from_gpu<float>(stream, weights);

  std::vector<float> score(n), choice(n), groups(r.n_groups), want_weights(k);
  std::vector<int32_t> want_ids(k);
  for (size_t t = 0; t < kTokens; ++t) {
    route_token({&logits[t * (n + 1)], n},
                r.has_bias() ? std::span<const float>(bias) : std::span<const float>(), r,
                {score, choice, groups}, want_ids, want_weights);
    if (r.simulated_ranks > 0) balance(r, static_cast<int64_t>(t), want_ids);
    for (size_t i = 0; i < k; ++i) {
      ASSERT_EQ(got_ids[t * k + i], want_ids[i]) << "token " << t << ", expert " << i;
      ASSERT_NEAR(got_weights[t * k + i], want_weights[i], 1e-5 * want_weights[i]);
    }
  }
}

TEST(GpuRouter, SimulatesBalancedRoutingAsTheCpuDoes) {
  std::mt19937 rng(4);
  for (const int ranks : {8, 10, 32, 256})
    expect_same_choice({{.simulated_ranks = ranks}, false}, rng);
}

TEST(GpuRouter, ChoosesAsTheCpuDoes) {
  std::mt19937 rng(3);
  for (const auto& [experts, active, groups, active_groups] : {std::tuple{256, 8, 8, 4},
                                                               {160, 6, 8, 3},
                                                               {64, 6, 1, 1},
                                                               {384, 8, 1, 1},
                                                               {8, 3, 4, 2},
                                                               {2, 1, 2, 1},
                                                               {1024, 8, 64, 40}})
    for (const TopkMethod method :
         {TopkMethod::kGreedy, TopkMethod::kGroupLimitedGreedy, TopkMethod::kNoauxTc})
      for (const bool sigmoid : {false, true})
        for (const bool ties : {false, true})
          expect_same_choice({{.n_experts = experts,
                               .n_active = active,
                               .n_groups = groups,
                               .n_active_groups = active_groups,
                               .scoring = sigmoid ? Scoring::kSigmoid : Scoring::kSoftmax,
                               .method = method,
                               .normalize = active > 1 && sigmoid,
                               .scale = 2.5f},
                              ties},
                             rng);
}

}  // namespace
}  // namespace tandem::gpu
