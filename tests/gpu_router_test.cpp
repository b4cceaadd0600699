// The router on the GPU chooses as route_token() does, for random logits, biases and groups, and
// for logits that it computes itself, which are those of double precision.
#include <gtest/gtest.h>

#include <random>

#include "gpu_kernels/router.h"
#include "gpu_kernels/simulated_row.h"
#include "ops/router.h"
#include "tests/check_close.h"
#include "tests/gpu_memory.h"
#include "tests/gpu_weights.h"

namespace tandem::gpu {
namespace {

constexpr int kTokens = 9;

struct Case {
  RouterConfig router;  // `simulated` replaces the choice, as in layer 0
  bool ties;            // logits with few different values
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
               uses = on_gpu(stream, std::vector<uint32_t>(n + 1, ~0u)),  // the next number is 0
      ids = nans_on_gpu<int32_t>(kTokens * r.n_active),
               weights = nans_on_gpu<float>(kTokens * r.n_active);
  std::vector<int32_t> table = {0}, positions(kTokens);
  SimulatedRouterRows simulated;
  for (int32_t& position : positions) position = static_cast<int32_t>(rng() % 5000);
  if (r.simulated) table.assign(r.simulated->of_layer(0).begin(), r.simulated->of_layer(0).end());
  const Buffer dtable = on_gpu(stream, table), dpositions = on_gpu(stream, positions);
  if (r.simulated)
    simulated = {.ids = dtable.as<int32_t>(),
                 .n_rows = r.simulated->layers[0].n_rows,
                 .varies = r.simulated->varies,
                 .positions = dpositions.as<int32_t>(),
                 .first_token = 1001,
                 .token_stride = 3};
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
                 .simulated = simulated,
                 .uses = uses.as<uint32_t>()});
  const auto got_uses = from_gpu<uint32_t>(stream, uses);
  std::vector<uint32_t> want_uses(n + 1, ~0u);
  const auto got_ids = from_gpu<int32_t>(stream, ids);
  const auto got_weights = from_gpu<float>(stream, weights);

  std::vector<float> score(n), choice(n), groups(r.n_groups), want_weights(k);
  std::vector<int32_t> want_ids(k);
  for (size_t t = 0; t < kTokens; ++t) {
    route_token({&logits[t * (n + 1)], n},
                r.has_bias() ? std::span<const float>(bias) : std::span<const float>(), r,
                {score, choice, groups}, want_ids, want_weights);
    if (r.simulated)
      std::copy_n(
          table.begin() + static_cast<int64_t>(k) *
                              simulated_row(1001 + 3 * static_cast<int64_t>(t), positions[t],
                                            simulated.n_rows, simulated.varies),
          k, want_ids.begin());
    for (size_t i = 0; i < k; ++i) {
      ASSERT_EQ(got_ids[t * k + i], want_ids[i]) << "token " << t << ", expert " << i;
      ASSERT_NEAR(got_weights[t * k + i], want_weights[i], 1e-5 * want_weights[i]);
      ++want_uses[want_ids[i]];
    }
  }
  ASSERT_EQ(got_uses, want_uses);
}

TEST(GpuRouter, TakesSimulatedChoicesAsTheCpuDoes) {
  std::mt19937 rng(4);
  for (const bool varies : {false, true}) {
    SimulatedChoices choices = {.name = "", .n_experts = 256, .n_active = 8, .varies = varies};
    choices.layers = {{0, 37}};
    for (int i = 0; i < 37 * 8; ++i) choices.ids.push_back(static_cast<int32_t>(rng() % 256));
    RouterConfig router;
    router.simulated = std::make_shared<SimulatedChoices>(choices);
    expect_same_choice({router, false}, rng);
  }
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

// A float sum of n products in any order is off by at most n / 16 + 20 units of 2^-23 of the sum of
// magnitudes: a lane adds n / 1024 * 4 numbers before the sums of lanes, warps and shares.
void expect_products(int tokens, int experts, const test::WeightCase& c, int n_multiprocessors) {
  SCOPED_TRACE(testing::Message() << tokens << " tokens, " << experts << " x " << c.cols);
  std::mt19937 rng(6);
  Stream stream;
  const test::RandomWeight w(stream, rng, c);
  const test::Rows x(rng, tokens, c.cols, 1, 3);
  const test::OnGpuBuffer<float> on_gpu(stream, x.values);
  const test::OnGpuBuffer<uint32_t> counters(stream, std::vector<uint32_t>(kCounters, 0));
  const RouterConfig r = {.n_experts = experts,
                          .n_active = 3,
                          .n_groups = 1,
                          .n_active_groups = 1,
                          .scoring = Scoring::kSigmoid,
                          .method = TopkMethod::kNoauxTc,
                          .scale = 2.5f};
  RouterArgs args = {.x = on_gpu.data(),
                     .x_stride = x.stride,
                     .w = w.view(),
                     .n_multiprocessors = n_multiprocessors,
                     .logits = {},
                     .bias = nullptr,
                     .weights = {},
                     .ids = nullptr,
                     .ids_stride = r.n_active,
                     .tokens = tokens,
                     .n_experts = experts,
                     .n_active = r.n_active,
                     .n_groups = 1,
                     .n_active_groups = 1,
                     .scoring = RouterScoring::kSigmoid,
                     .group_score = GroupScore::kNone,
                     .normalize = false,
                     .scale = r.scale};
  const test::OnGpuBuffer<float> partial(route_partials(args) + 1);
  args.workspace = {partial.data(), counters.data()};
  std::vector<double> want, bounds;
  for (int t = 0; t < tokens; ++t)
    for (int e = 0; e < experts; ++e) {
      double sum = 0, magnitude = 0;
      for (int i = 0; i < c.cols; ++i) {
        sum += double{x.at(t, i)} * w.at(e, i);
        magnitude += std::abs(x.at(t, i) * w.at(e, i));
      }
      want.push_back(sum);
      bounds.push_back(magnitude * (c.cols / 16 + 20) * 0x1p-23 + 1e-37);
    }
  std::vector<float> score(experts), choice(experts), groups(1), want_weights(r.n_active);
  std::vector<int32_t> want_ids(r.n_active);
  for (int run = 0; run < 2; ++run) {  // the second run uses the counters that the first left
    const test::OnGpuBuffer<float> logits(tokens * experts), weights(tokens * r.n_active);
    const test::OnGpuBuffer<int32_t> ids(tokens * r.n_active);
    args.logits = {logits.data(), experts};
    args.weights = {weights.data(), r.n_active};
    args.ids = ids.data();
    route(stream, args);
    auto got = logits.values(stream);
    tandem::test::expect_close(got, want, bounds);
    const auto got_ids = ids.values(stream);
    for (int t = 0; t < tokens; ++t) {
      route_token({&got[size_t(t) * experts], size_t(experts)}, {}, r, {score, choice, groups},
                  want_ids, want_weights);
      for (int i = 0; i < r.n_active; ++i)
        ASSERT_EQ(got_ids[t * r.n_active + i], want_ids[i]) << "token " << t;
    }
  }
}

TEST(GpuRouter, MultipliesAndChooses) {
  const auto of = [](int rows, int cols, Number type) {
    return test::WeightCase{.rows = rows, .cols = cols, .type = type};
  };
  expect_products(1, 256, of(256, 3000, Number::kF32), 132);
  expect_products(3, 10, of(10, 2500, Number::kBF16), 4);
  expect_products(17, 37, of(37, 130, Number::kF8E4M3), 1);
  expect_products(8, 7, of(7, 4097, Number::kF32), 2);
}

}  // namespace
}  // namespace tandem::gpu
