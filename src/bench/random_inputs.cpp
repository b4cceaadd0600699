#include "bench/random_inputs.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "cpu_kernels/kernels.h"
#include "offload/plan/workload.h"

namespace tandem {

std::vector<int32_t> random_tokens(int n, int vocab, std::mt19937& rng) {
  std::vector<int32_t> tokens(n);
  for (int32_t& t : tokens) t = std::uniform_int_distribution<int32_t>(0, vocab - 1)(rng);
  return tokens;
}

std::vector<int32_t> first_pages(int n) {
  std::vector<int32_t> pages(n);
  std::iota(pages.begin(), pages.end(), 0);
  return pages;
}

void fill_with_random(const KvCache& cache, const ModelConfig& config) {
  std::minstd_rand rng(1);
  for (int l = 0; l < config.n_layers; ++l) {
    const TensorView layer = cache.layer(l);
    for (int64_t r = 0; r < layer.rows; ++r)
      for (int64_t i = 0; i < layer.cols; ++i) {
        const float value = static_cast<float>(rng()) * 0x1p-30f - 1;
        if (layer.dtype == DType::kF32)
          layer.row<float>(r)[i] = value;
        else
          layer.row<cpu::bf16>(r)[i] = static_cast<cpu::bf16>(std::bit_cast<uint32_t>(value) >> 16);
      }
  }
}

RandomRouting::RandomRouting(const RouterConfig& router, int n_tokens, bool skew, std::mt19937& rng)
    : n_active_(router.n_active),
      ids_(static_cast<size_t>(n_tokens) * router.n_active),
      weights_(ids_.size(), 1.f / static_cast<float>(router.n_active)) {
  std::vector<int32_t> others(router.n_experts - (skew ? 1 : 0));
  std::iota(others.begin(), others.end(), skew ? 1 : 0);
  const int last = static_cast<int>(others.size()) - 1;
  for (int t = 0; t < n_tokens; ++t) {
    int32_t* chosen = ids_.data() + int64_t{t} * router.n_active;
    const int hot = skew && t % 2 == 0 ? 1 : 0;
    chosen[0] = 0;
    for (int k = hot; k < router.n_active; ++k) {
      std::swap(others[k], others[std::uniform_int_distribution<int>(k, last)(rng)]);
      chosen[k] = others[k];
    }
  }
}

Routing RandomRouting::routing() const {
  const int64_t n = std::ssize(ids_) / n_active_;
  return {{ids_.data(), n, n_active_, n_active_, DType::kI32},
          {weights_.data(), n, n_active_, n_active_, DType::kF32}};
}

std::vector<RandomRouting> routings_of_equal_cost(const RouterConfig& router, int n_tokens,
                                                  bool skew, std::mt19937& rng) {
  constexpr int kDrawn = 33;
  constexpr size_t kKept = 8;
  std::vector<std::pair<int64_t, RandomRouting>> drawn;
  for (int i = 0; i < kDrawn; ++i) {
    RandomRouting one(router, n_tokens, skew, rng);
    const std::vector<int> rows = rows_of_experts(router, one.routing().ids);
    drawn.emplace_back(std::count(rows.begin(), rows.end(), 0), std::move(one));
  }
  std::sort(drawn.begin(), drawn.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  const int64_t usual = drawn[kDrawn / 2].first;
  std::vector<RandomRouting> kept;
  for (auto& [unused_experts, one] : drawn)
    if (unused_experts == usual && kept.size() < kKept) kept.push_back(std::move(one));
  return kept;
}

double expected_experts(const RouterConfig& router, int64_t n_tokens) {
  const double all = router.n_experts;
  if (router.simulated) return router.simulated->expected_experts(static_cast<double>(n_tokens));
  return all * chance_of_use(router.n_active / all, static_cast<double>(n_tokens));
}

std::vector<int> rows_of_experts(const RouterConfig& router, const TensorView& ids) {
  std::vector<int> rows(router.n_experts);
  for (int64_t t = 0; t < ids.rows; ++t)
    for (int64_t k = 0; k < ids.cols; ++k) ++rows[ids.row<int32_t>(t)[k]];
  return rows;
}

}  // namespace tandem
