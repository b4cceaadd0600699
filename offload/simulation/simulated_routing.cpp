#include "offload/simulation/simulated_routing.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>

#include "core/check.h"
#include "core/split_mix.h"
#include "io/json.h"
#include "model/simulated_choices.h"
#include "offload/plan/workload.h"

namespace tandem {
namespace {

using Kind = SimulatedRouting::Kind;

constexpr int64_t kRows = 2048;  // of a layer whose choices are random: 4 MB for R1

// Random numbers that are the same everywhere.
class Random {
 public:
  explicit Random(int layer) : state_(static_cast<uint64_t>(layer)) {}
  // In [0, n).
  int64_t below(int64_t n) {
    return static_cast<int64_t>(split_mix(state_ += kSplitMixStep) % static_cast<uint64_t>(n));
  }
  // Moves n randomly chosen elements to the front.
  void draw(std::span<int32_t> from, int64_t n) {
    for (int64_t i = 0; i < n; ++i) std::swap(from[i], from[i + below(std::ssize(from) - i)]);
  }

 private:
  uint64_t state_;
};

std::vector<int32_t> numbers_to(int n) {
  std::vector<int32_t> numbers(n);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

// Experts in an order in which tokens take turns: their places continue it.
std::vector<int32_t> in_turns(const RouterConfig& router) {
  std::vector<int32_t> ids(std::lcm(router.n_experts, router.n_active));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i % router.n_experts);
  return ids;
}

// An expert that several ranks have is counted to one of them. One that a single rank has comes
// first, because its rows cannot go elsewhere.
std::vector<std::vector<int32_t>> experts_of_ranks(const RouterConfig& router, int layer,
                                                   const SharingRanks& ranks) {
  std::vector<std::vector<int32_t>> of_rank(ranks.n);
  for (const bool has_replicas : {false, true})
    for (int32_t e = 0; e < router.n_experts; ++e) {
      const std::span<const int32_t> owners = ranks.of_expert(layer, e);
      if (owners.empty() || (owners.size() > 1) != has_replicas) continue;
      const int32_t owner = *std::min_element(owners.begin(), owners.end(), [&](int a, int b) {
        return of_rank[a].size() < of_rank[b].size();
      });
      of_rank[owner].push_back(e);
    }
  return of_rank;
}

std::vector<std::vector<int32_t>> blocks_of_experts(const RouterConfig& router, int n_ranks) {
  std::vector<std::vector<int32_t>> of_rank(n_ranks);
  const int64_t n = router.n_experts;
  for (int64_t rank = 0; rank < n_ranks; ++rank)
    for (int64_t e = rank * n / n_ranks; e < (rank + 1) * n / n_ranks; ++e)
      of_rank[rank].push_back(static_cast<int32_t>(e));
  return of_rank;
}

std::vector<int32_t> evenly_over(const std::vector<std::vector<int32_t>>& experts_of_rank,
                                 const RouterConfig& router, int layer) {
  const int64_t n_ranks = std::ssize(experts_of_rank), n_active = router.n_active;
  const int64_t most = (n_active + n_ranks - 1) / n_ranks;  // of a token on a rank
  for (int64_t rank = 0; rank < n_ranks; ++rank)
    require(
        std::ssize(experts_of_rank[rank]) >= most,
        "--simulate-routing balanced-ranks: {} of a token's {} experts would be of rank {}, which "
        "has {} of layer {}",
        most, n_active, rank, experts_of_rank[rank].size(), layer);
  std::vector<int32_t> ids(std::lcm(n_ranks, n_active));
  for (int64_t i = 0; i < std::ssize(ids); ++i)
    ids[i] = experts_of_rank[i % n_ranks][i % n_active / n_ranks];
  return ids;
}

std::vector<int32_t> random_within_groups(const RouterConfig& router, int layer) {
  const bool limited = router.method != TopkMethod::kGreedy && router.n_groups > 1;
  const int n_groups = limited ? router.n_groups : 1;
  const int n_chosen = limited ? router.n_active_groups : 1;
  const int size = router.n_experts / n_groups;
  Random random(layer);
  std::vector<int32_t> groups = numbers_to(n_groups), allowed, ids;
  for (int64_t row = 0; row < kRows; ++row) {
    random.draw(groups, n_chosen);
    allowed.clear();
    for (const int32_t group : std::span(groups).first(n_chosen))
      for (int32_t e = group * size; e < (group + 1) * size; ++e) allowed.push_back(e);
    random.draw(allowed, router.n_active);
    ids.insert(ids.end(), allowed.begin(), allowed.begin() + router.n_active);
  }
  return ids;
}

// The number of rows with each expert: at most kRows, and n_active * kRows together. `share`: the
// part of the tokens that choose it, about n_active together.
std::vector<int64_t> rows_of_shares(std::span<const double> share, int n_active) {
  const double sum = std::accumulate(share.begin(), share.end(), 0.0);
  std::vector<int64_t> rows;
  std::vector<std::pair<double, size_t>> rests;
  int64_t left = n_active * kRows;
  for (size_t e = 0; e < share.size(); ++e) {
    const double wanted = share[e] * n_active / sum * static_cast<double>(kRows);
    rows.push_back(std::min(kRows, static_cast<int64_t>(wanted)));
    left -= rows.back();
    rests.emplace_back(static_cast<double>(rows.back()) - wanted, e);
  }
  std::sort(rests.begin(), rests.end());  // the largest fraction that was cut off comes first
  while (left > 0)
    for (const auto& [rest, e] : rests)
      if (left > 0 && rows[e] < kRows && share[e] > 0) ++rows[e], --left;
  return rows;
}

// Draws without replacement from the rows that experts are still to have. With m rows left, an
// expert with r of them to come has probability r / m, by systematic sampling (Madow, 1949): of the
// experts in a random order, each with r of n_active * m points on a line, those are chosen that
// have the points u, u + m, u + 2 m, ... Because r <= m they differ, and every expert gets all its
// rows.
std::vector<int32_t> random_with_shares(std::span<const double> share, int n_active, int layer) {
  std::vector<int64_t> to_come = rows_of_shares(share, n_active);
  std::vector<int32_t> order = numbers_to(static_cast<int>(share.size())), ids;
  Random random(layer);
  for (int64_t m = kRows; m > 0; --m) {
    random.draw(order, std::ssize(order));
    int64_t next = random.below(m), passed = 0;
    for (const int32_t e : order) {
      passed += to_come[e];
      if (next >= passed) continue;
      ids.push_back(e);
      --to_come[e];
      next += m;
    }
  }
  return ids;
}

RoutingStatistics statistics_of(const SimulatedRouting& routing, const ModelConfig& whole) {
  return {whole, read_text_file(routing.file, kMaxStatisticsBytes), routing.file};
}

// The shares of the n-th layer with experts.
std::vector<double> shares_of(const RoutingStatistics& statistics, const ModelConfig& whole,
                              int n) {
  std::vector<int> moe;
  for (int l = 0; l < whole.n_layers; ++l)
    if (whole.is_moe(l)) moe.push_back(l);
  std::vector<double> shares;
  for (int e = 0; e < whole.router.n_experts; ++e)
    shares.push_back(statistics.share(moe[n % moe.size()], e));
  return shares;
}

std::vector<int32_t> balanced(const RouterConfig& router, int layer, int stated,
                              const SharingRanks& ranks) {
  if (stated > 0) return evenly_over(blocks_of_experts(router, stated), router, layer);
  const auto of_rank = experts_of_ranks(router, layer, ranks);
  const bool here = std::any_of(of_rank.begin(), of_rank.end(),
                                [](const auto& experts) { return !experts.empty(); });
  return here ? evenly_over(of_rank, router, layer) : std::vector<int32_t>();  // another stage's
}

}  // namespace

SimulatedRouting simulated_routing(const std::string& text) {
  if (text == "model") return {};
  if (text == "balanced-ranks") return {Kind::kBalancedRanks};
  if (text == "balanced-experts") return {Kind::kBalancedExperts};
  if (text == "grouped-random") return {Kind::kGroupedRandom};
  const std::string stated = "balanced-ranks:";
  if (text.starts_with(stated)) {
    const std::string digits = text.substr(stated.size());
    const bool is_number =
        !digits.empty() && digits.size() < 8 &&
        std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; });
    const int n = is_number ? std::stoi(digits) : 0;
    require(n > 0, "--simulate-routing {}: expected a number of ranks, as in balanced-ranks:32",
            text);
    return {Kind::kBalancedRanks, n};
  }
  std::error_code ignored;
  require(
      std::filesystem::is_regular_file(text, ignored),
      "--simulate-routing {}: choose model, balanced-ranks, balanced-ranks:N, balanced-experts, "
      "grouped-random or a file of routing statistics; there is no such file",
      text);
  return {Kind::kStatistics, 0, text};
}

std::string name_of(const SimulatedRouting& routing) {
  switch (routing.kind) {
    case Kind::kModel:
      return "model";
    case Kind::kBalancedRanks:
      return routing.n_ranks > 0 ? fmt::format("balanced-ranks:{}", routing.n_ranks)
                                 : "balanced-ranks";
    case Kind::kBalancedExperts:
      return "balanced-experts";
    case Kind::kGroupedRandom:
      return "grouped-random";
    case Kind::kStatistics:
      break;
  }
  return routing.file;
}

void require_sound(const SimulatedRouting& routing, const ModelConfig& config, int n_ranks) {
  if (routing.kind == Kind::kModel) return;
  const RouterConfig& r = config.router;
  require(r.n_experts > 0, "--simulate-routing {}: the model has no routed experts: leave it out",
          name_of(routing));
  if (routing.kind == Kind::kStatistics) statistics_of(routing, config);
  if (routing.kind != Kind::kBalancedRanks) return;
  require(routing.n_ranks > 0 || n_ranks > 1,
          "--simulate-routing balanced-ranks: one rank has all experts here: say how many there "
          "would be, as in balanced-ranks:32");
  if (routing.n_ranks == 0) return;
  require(routing.n_ranks <= r.n_experts,
          "--simulate-routing {}: must be at most the {} experts of a layer", name_of(routing),
          r.n_experts);
  evenly_over(blocks_of_experts(r, routing.n_ranks), r, config.n_dense_layers);
}

std::shared_ptr<const SimulatedChoices> simulated_choices(const SimulatedRouting& routing,
                                                          const ModelConfig& config,
                                                          const ModelConfig& whole,
                                                          const SharingRanks& ranks) {
  if (routing.kind == Kind::kModel) return nullptr;
  require_sound(routing, whole, ranks.n);
  const RouterConfig& router = config.router;
  std::optional<RoutingStatistics> statistics;
  if (routing.kind == Kind::kStatistics) {
    require(router.n_experts == whole.router.n_experts,
            "--simulate-routing {}: the memory holds {} of the {} experts of a layer: choose fewer "
            "--layers or raise --memory",
            routing.file, router.n_experts, whole.router.n_experts);
    statistics = statistics_of(routing, whole);
  }
  const auto ids_of = [&](int layer, int n_before) {
    switch (routing.kind) {
      case Kind::kBalancedRanks:
        return balanced(router, layer, routing.n_ranks, ranks);
      case Kind::kGroupedRandom:
        return random_within_groups(router, layer);
      case Kind::kStatistics:
        // Layers for multi-token prediction are in no statistics.
        return random_with_shares(
            layer < config.n_layers
                ? shares_of(*statistics, whole, n_before)
                : std::vector<double>(router.n_experts, 1.0 * router.n_active / router.n_experts),
            router.n_active, layer);
      default:
        return in_turns(router);
    }
  };
  auto choices = std::make_shared<SimulatedChoices>();
  choices->name = name_of(routing);
  choices->n_experts = router.n_experts;
  choices->n_active = router.n_active;
  choices->varies = routing.kind == Kind::kGroupedRandom || routing.kind == Kind::kStatistics;
  int n_before = 0;
  for (int layer = 0; layer < config.n_all_layers(); ++layer) {
    SimulatedChoices::Layer& of = choices->layers.emplace_back();
    if (!config.is_moe(layer)) continue;
    const std::vector<int32_t> ids = ids_of(layer, n_before++);
    of = {std::ssize(choices->ids) / router.n_active, std::ssize(ids) / router.n_active};
    choices->ids.insert(choices->ids.end(), ids.begin(), ids.end());
  }
  return choices;
}

}  // namespace tandem
