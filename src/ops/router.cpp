#include "ops/router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace tandem {
namespace {

constexpr float kOut = -std::numeric_limits<float>::infinity();

void softmax(std::span<const float> logits, std::span<float> out) {
  const float max = *std::max_element(logits.begin(), logits.end());
  float sum = 0;
  for (size_t e = 0; e < logits.size(); ++e) sum += out[e] = std::exp(logits[e] - max);
  for (float& p : out) p /= sum;
}

// Index of the largest value; the lowest index if several are equal.
int argmax(std::span<const float> values) {
  return static_cast<int>(std::max_element(values.begin(), values.end()) - values.begin());
}

// Index of the smallest value; the highest index if several are equal.
int last_argmin(std::span<const float> values) {
  int worst = 0;
  for (int i = 1; i < static_cast<int>(values.size()); ++i)
    if (values[i] <= values[worst]) worst = i;
  return worst;
}

// V2 ranks a group by its best expert, V3 by the sum of its best two.
float group_score(std::span<const float> choice, TopkMethod method) {
  float first = kOut, second = kOut;
  for (const float c : choice) {
    second = std::max(second, std::min(c, first));
    first = std::max(first, c);
  }
  return method == TopkMethod::kNoauxTc && choice.size() > 1 ? first + second : first;
}

// Excludes the experts of the worst groups until n_active_groups groups are left.
void keep_best_groups(std::span<float> choice, const RouterConfig& router,
                      std::span<float> scores) {
  const size_t size = choice.size() / router.n_groups;
  for (int g = 0; g < router.n_groups; ++g)
    scores[g] = group_score(choice.subspan(g * size, size), router.method);
  for (int left = router.n_groups; left > router.n_active_groups; --left) {
    const int worst = last_argmin(scores);
    std::fill_n(choice.begin() + worst * size, size, kOut);
    scores[worst] = -kOut;
  }
}

}  // namespace

void route_token(std::span<const float> logits, std::span<const float> bias,
                 const RouterConfig& router, RouterScratch scratch, std::span<int32_t> ids,
                 std::span<float> weights) {
  const auto [score, choice, groups] = scratch;
  if (router.scoring == Scoring::kSoftmax) {
    softmax(logits, score);
  } else {
    for (size_t e = 0; e < logits.size(); ++e) score[e] = 1 / (1 + std::exp(-logits[e]));
  }
  for (size_t e = 0; e < score.size(); ++e) choice[e] = score[e] + (bias.empty() ? 0 : bias[e]);
  if (router.method != TopkMethod::kGreedy && router.n_groups > 1)
    keep_best_groups(choice, router, groups);

  float sum = 0;
  for (int k = 0; k < router.n_active; ++k) {
    ids[k] = argmax(choice);
    weights[k] = score[ids[k]];
    choice[ids[k]] = kOut;
    sum += weights[k];
  }
  const bool normalize = router.normalize && router.n_active > 1;
  const float scale = normalize && !router.scale_normalized ? 1 : router.scale;
  for (float& w : weights) w *= normalize ? scale / (sum + 1e-20f) : scale;
}

std::vector<int32_t> random_experts(const RouterConfig& router, int n_tokens,
                                    std::mt19937& random) {
  const bool by_groups = router.n_groups > 1 && router.method != TopkMethod::kGreedy;
  const int n_groups = by_groups ? router.n_groups : 1;
  const int of_group = router.n_experts / n_groups;
  const int n_taken =
      std::max(by_groups ? router.n_active_groups : 1, (router.n_active + of_group - 1) / of_group);
  std::vector<int32_t> groups(n_groups), experts, chosen;
  std::iota(groups.begin(), groups.end(), 0);
  for (int t = 0; t < n_tokens; ++t) {
    std::shuffle(groups.begin(), groups.end(), random);
    experts.clear();
    for (int g = 0; g < n_taken; ++g)
      for (int e = 0; e < of_group; ++e) experts.push_back(groups[g] * of_group + e);
    std::shuffle(experts.begin(), experts.end(), random);
    chosen.insert(chosen.end(), experts.begin(), experts.begin() + router.n_active);
  }
  return chosen;
}

}  // namespace tandem
