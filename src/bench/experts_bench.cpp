#include "bench/experts_bench.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>

#include "bench/roofline.h"
#include "offload/cpu_experts.h"

namespace tandem {
namespace {

// Routing of one step, drawn at random. In a skewed one expert 0 is taken by every other token and
// by no one else.
class Step {
 public:
  Step(const RouterConfig& router, int n_tokens, bool skew, std::mt19937& rng)
      : ids_(static_cast<size_t>(n_tokens) * router.n_active),
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
    const auto n = int64_t{n_tokens};
    routing_ = {{ids_.data(), n, router.n_active, router.n_active, DType::kI32},
                {weights_.data(), n, router.n_active, router.n_active, DType::kF32}};
  }
  const Routing& routing() const { return routing_; }

 private:
  std::vector<int32_t> ids_;
  std::vector<float> weights_;
  Routing routing_;
};

// Some steps of equal cost: as many different experts as half of all random steps have.
std::vector<std::unique_ptr<Step>> steps_of_equal_cost(const ExpertsBench& bench,
                                                       const ModelConfig& config, int n_tokens,
                                                       bool skew, std::mt19937& rng) {
  constexpr int kDrawn = 33;
  constexpr size_t kKept = 8;
  std::vector<std::pair<int, std::unique_ptr<Step>>> drawn;
  for (int i = 0; i < kDrawn; ++i) {
    auto step = std::make_unique<Step>(config.router, n_tokens, skew, rng);
    const int n = cost_of_experts(config, bench.format, step->routing().ids).n_experts;
    drawn.emplace_back(n, std::move(step));
  }
  std::sort(drawn.begin(), drawn.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  const int usual = drawn[kDrawn / 2].first;
  std::vector<std::unique_ptr<Step>> kept;
  for (auto& [n, step] : drawn)
    if (n == usual && kept.size() < kKept) kept.push_back(std::move(step));
  return kept;
}

}  // namespace

ExpertsCost cost_of_experts(const ModelConfig& c, WeightFormat format, const TensorView& ids) {
  std::vector<int> rows(c.router.n_experts);
  for (int64_t t = 0; t < ids.rows; ++t)
    for (int64_t k = 0; k < ids.cols; ++k) ++rows[ids.row<int32_t>(t)[k]];
  const auto n = std::ssize(rows) - std::count(rows.begin(), rows.end(), 0);
  const int64_t pairs = ids.rows * ids.cols;
  return {n * expert_bytes(c, format), 2 * 3 * pairs * c.dim * c.expert_dim, static_cast<int>(n),
          *std::max_element(rows.begin(), rows.end())};
}

void bench_experts(const ExpertsBench& bench, const cpu::KernelTable& kernels, MachineSpeed& speed,
                   const OnRow& on_row) {
  const Resident resident =
      resident_experts(bench.config, bench.format, bench.memory_bytes, cold_bytes());
  ModelConfig config = with_experts(bench.config, resident.experts);
  config.n_layers = resident.layers;
  config.n_dense_layers = 0;
  config.moe_layer_freq = 1;
  CpuWeights home(kernels);
  const ModelWeights weights = random_weights(
      config, {{DType::kBF16}, bench.format},
      [](const WeightSpec& spec) { return spec.use == WeightUse::kExpert; }, home, speed.team());

  const int most = *std::max_element(bench.tokens.begin(), bench.tokens.end());
  CpuExperts experts(kernels, config, weights, most, speed.team());
  TensorView x, y;
  const Arena arena = Arena::holding([&](auto visit) {
    visit(x, most, config.dim, DType::kF32);
    visit(y, most, config.dim, DType::kF32);
  });
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < most * x.cols; ++i) x.row<float>(0)[i] = normal(rng);

  const cpu::PeakLoop peak = peak_of_products(speed, kernels, bench.format.dtype);
  for (const int n : bench.tokens) {
    std::vector<std::vector<std::unique_ptr<Step>>> steps;  // uniform, skewed
    std::vector<Work> works;
    std::vector<ExpertsCost> costs;
    for (const bool skew : {false, true}) {
      if (skew && !bench.skew) break;
      steps.push_back(steps_of_equal_cost(bench, config, n, skew, rng));
      costs.push_back(cost_of_experts(config, bench.format, steps.back()[0]->routing().ids));
      works.push_back(
          {{costs.back().bytes, costs.back().ops}, [&, which = steps.size() - 1](int64_t run) {
             const auto& own = steps[which];
             experts.submit({static_cast<int>(run % resident.layers), x.rows_from(0, n),
                             own[run % std::ssize(own)]->routing()});
             experts.add_to(y.rows_from(0, n));
           }});
    }
    const std::vector<Measured> measured = measure(speed, peak, works, bench.seconds);
    for (size_t w = 0; w < works.size(); ++w) {
      nlohmann::ordered_json row = {
          {"bench", "experts"},
          {"config", bench.config_name},
          {"format", format_name(bench.format)},
          {"isa", kernels.name},
          {"threads", speed.team().size()},
          {"routing", w == 0 ? "uniform" : "skewed"},
          {"tokens", n},
          {"rows_per_expert",
           static_cast<double>(int64_t{n} * config.router.n_active) / costs[w].n_experts}};
      add_fields(row, measured[w], peak);
      row["rows_of_busiest_expert"] = costs[w].rows_of_busiest;
      row["experts"] = costs[w].n_experts;
      row["resident_experts"] = resident.experts;
      row["resident_layers"] = resident.layers;
      if (w == 1) row["seconds_over_uniform"] = measured[1].seconds / measured[0].seconds;
      on_row(row);
    }
  }
}

}  // namespace tandem
