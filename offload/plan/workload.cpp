#include "offload/plan/workload.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "core/check.h"
#include "io/json.h"
#include "io/json_fields.h"

namespace tandem {
namespace {

constexpr int kMaxSequences = 1 << 20, kMaxRequestTokens = 1 << 24, kMostRedundant = 1 << 16;

}  // namespace

const WorkloadPreset& workload_preset(const std::string& name) {
  static constexpr WorkloadPreset kPreset = {"isl1k-osl1k", 1000, 1000, {8, 64, 2048}};
  require(name == kPreset.name, "--preset {}: must be {}", name, kPreset.name);
  return kPreset;
}

void require_sound(const Workload& w, const ModelConfig& config) {
  require(w.context >= 1 && w.context <= config.max_context,
          "--ctx {}: must be between 1 and the model's {}", w.context, config.max_context);
  require(w.concurrency >= 0 && w.concurrency <= kMaxSequences,
          "--concurrency {}: must be between 0 and {}", w.concurrency, kMaxSequences);
  for (const int n : {w.prompt_tokens, w.output_tokens})
    require(n >= 1 && n <= kMaxRequestTokens,
            "{} tokens of prompt or output: must be between 1 and {}", n, kMaxRequestTokens);
  require(int64_t{w.prompt_tokens} + w.output_tokens <= w.context,
          "--prompt {} and --output {} tokens are more than the --ctx of {}: raise it",
          w.prompt_tokens, w.output_tokens, w.context);
  require(w.tokens_per_second_per_user >= 0 && w.tokens_per_second_per_user <= 1e6,
          "--user-speed {}: must be between 0 and 1000000 tokens a second",
          w.tokens_per_second_per_user);
  require(!w.draft_tokens || (*w.draft_tokens >= 0 && *w.draft_tokens <= kMaxDraftTokens),
          "--draft-tokens {}: must be between 0 and {}", w.draft_tokens.value_or(0),
          kMaxDraftTokens);
  const int redundant = w.redundant_experts.value_or(0);
  require(redundant == 0 || config.router.n_experts > 0,
          "--redundant {}: the model has no routed experts: leave it out", redundant);
  require(redundant >= 0 && redundant <= kMostRedundant, "--redundant {}: must be between 0 and {}",
          redundant, kMostRedundant);
  require(w.acceptance >= 0 && w.acceptance <= 1, "--acceptance {}: must be between 0 and 1",
          w.acceptance);
  require(w.first_token_seconds >= 0 && w.first_token_seconds <= 1e6,
          "--slo-ttft {}: must be between 0 and 1000000 seconds", w.first_token_seconds);
}

RoutingCounts::RoutingCounts(const ModelConfig& c) : of_layer(c.n_layers) {
  for (int l = 0; l < c.n_layers; ++l)
    if (c.is_moe(l)) of_layer[l].resize(c.router.n_experts);
}

namespace {

// Identifies the model by its shapes: routers of different models may have equally many experts.
std::string name_of_shapes(const ModelConfig& c) {
  return fmt::format("{}, {} layers of {}, {} of {} experts of {}, vocabulary of {}",
                     c.architecture, c.n_layers, c.dim, c.router.n_active, c.router.n_experts,
                     c.expert_dim, c.vocab);
}

}  // namespace

std::string routing_statistics_json(const ModelConfig& c, const RoutingCounts& counts) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  int64_t chosen = 0;
  for (const auto& row : counts.of_layer) {
    if (row.empty()) continue;
    chosen = std::accumulate(row.begin(), row.end(), int64_t{0});
    rows.push_back(row);
  }
  nlohmann::ordered_json neighbours = nlohmann::ordered_json::array();
  for (const RoutingCounts::Windows& w : counts.neighbours)
    if (w.n > 0) neighbours.push_back(static_cast<double>(w.experts) / static_cast<double>(w.n));
  return nlohmann::ordered_json{{"model", name_of_shapes(c)},
                                {"layers", c.n_layers},
                                {"experts", c.router.n_experts},
                                {"tokens", chosen / std::max(1, c.router.n_active)},
                                {"experts_of_neighbours", neighbours},
                                {"counts", rows}}
             .dump() +
         "\n";
}

RoutingStatistics::RoutingStatistics(const ModelConfig& c)
    : even_(c.router.n_experts > 0 ? static_cast<double>(c.router.n_active) / c.router.n_experts
                                   : 0),
      n_active_(c.router.n_active),
      n_experts_(c.router.n_experts) {
  const SimulatedChoices* const simulated = c.router.simulated.get();
  if (!simulated) return;
  if (!simulated->varies) {
    n_in_turns_ = simulated->expected_experts(n_experts_);
    return;
  }
  row_of_.assign(c.n_layers, -1);
  for (int l = 0; l < c.n_layers; ++l)
    if (c.is_moe(l)) add_layer(l, simulated->shares(l));
}

void RoutingStatistics::add_layer(int layer, std::vector<double> shares) {
  row_of_[layer] = static_cast<int>(shares_.size());
  std::vector<double> logs;
  for (const double share : shares) logs.push_back(std::log1p(-std::min(share, 1.0)));
  shares_.push_back(std::move(shares));
  log_rest_.push_back(std::move(logs));
}

namespace {

// What a server's /experts answers, as --record-routing would write it. Layers for multi-token
// prediction are left out.
nlohmann::json recorded_form(const nlohmann::json& served, const ModelConfig& c,
                             const std::string& source) {
  nlohmann::json counts = nlohmann::json::array();
  int next = 0;
  for (const nlohmann::json& layer : served["layers"]) {
    while (next < c.n_layers && !c.is_moe(next)) ++next;
    require(layer.is_object() && layer.contains("layer") && layer.contains("counts"),
            "{}: an element of layers has no layer or no counts", source);
    if (next == c.n_layers) break;
    require(layer["layer"] == next, "{}: layers has {}, and layer {} of the model follows", source,
            shown(layer["layer"]), next);
    counts.push_back(layer["counts"]);
    ++next;
  }
  return {{"layers", c.n_layers},
          {"experts", counts.empty() ? size_t{0} : counts[0].size()},
          {"tokens", served.contains("tokens") ? served["tokens"] : nlohmann::json()},
          {"counts", std::move(counts)}};
}

}  // namespace

RoutingStatistics::RoutingStatistics(const ModelConfig& c, std::string_view text,
                                     const std::string& source)
    : RoutingStatistics(c) {
  nlohmann::json tree = parse_json(text, source);
  if (tree.is_object() && tree.contains("layers") && tree["layers"].is_array())
    tree = recorded_form(tree, c, source);
  JsonFields fields(tree, source);
  const int layers = fields.integer("layers", 1, 1 << 20);
  const int experts = fields.integer("experts", 1, 1 << 20);
  const double tokens = fields.positive("tokens", 1e18);
  const auto& counts = fields.list("counts", 1 << 20);
  const nlohmann::json none = nlohmann::json::array();
  const auto& neighbours = fields.has("experts_of_neighbours")
                               ? fields.list("experts_of_neighbours", kMaxDraftTokens + 1)
                               : none;
  const std::string model = fields.text("model", name_of_shapes(c));
  fields.refuse_others();
  require(layers == c.n_layers && experts == c.router.n_experts,
          "{}: statistics of {} layers with {} experts, and the model has {} with {}: they are of "
          "another model",
          source, layers, experts, c.n_layers, c.router.n_experts);
  require(model == name_of_shapes(c), "{}: statistics of another model: {}, and this one is {}",
          source, shown(model), name_of_shapes(c));
  row_of_.assign(c.n_layers, -1);
  std::vector<int> moe;
  for (int l = 0; l < c.n_layers; ++l)
    if (c.is_moe(l)) moe.push_back(l);
  require(counts.size() == moe.size(),
          "{}: counts of {} layers, and {} have experts: they are of another model", source,
          counts.size(), moe.size());
  for (size_t row = 0; row < counts.size(); ++row) {
    require(counts[row].is_array() && static_cast<int>(counts[row].size()) == experts,
            "{}: counts[{}] must list {} numbers", source, row, experts);
    std::vector<double> shares;
    double sum = 0;
    for (const auto& count : counts[row]) {
      const double n = count.is_number() ? count.get<double>() : -1;
      if (n < 0 || n > tokens)
        fail("{}: counts[{}] has {}: expected a number 0 .. tokens", source, row, shown(count));
      shares.push_back(n / tokens);
      sum += shares.back();
    }
    require(std::abs(sum - c.router.n_active) < 0.01 * c.router.n_active,
            "{}: counts[{}] add up to {:.2f} experts a token, and the model chooses {}", source,
            row, sum, c.router.n_active);
    add_layer(moe[row], std::move(shares));
  }
  read_neighbours(neighbours, source);
}

// Finds for each measured mean the number of independent tokens with this mean, by bisection.
void RoutingStatistics::read_neighbours(const nlohmann::json& means, const std::string& source) {
  double last = 0;
  for (size_t i = 0; i < means.size(); ++i) {
    const double most = std::min(n_experts_, static_cast<double>(i + 1) * n_active_);
    const double mean = means[i].is_number() ? means[i].get<double>() : -1;
    if (mean < std::max(n_active_, last) - 1e-6 || mean > most + 1e-6)
      fail(
          "{}: experts_of_neighbours[{}] is {}: expected a number {} .. {}, not below the one "
          "before",
          source, i, shown(means[i]), n_active_, most);
    last = mean;
    double low = 0, high = static_cast<double>(i + 1);
    // Independent tokens cannot choose more experts than these; neighbours that do count as such.
    if (mean_different(high) > mean)
      for (int step = 0; step < 60; ++step) {
        const double middle = (low + high) / 2;
        (mean_different(middle) < mean ? low : high) = middle;
      }
    independent_.push_back(high);
  }
}

// The mean over MoE layers of the different experts that so many independent tokens choose.
double RoutingStatistics::mean_different(double tokens) const {
  double sum = 0;
  for (const std::vector<double>& logs : log_rest_)
    for (const double log_rest : logs) sum -= std::expm1(tokens * log_rest);
  return sum / std::max<double>(1, static_cast<double>(log_rest_.size()));
}

double chance_of_use(double share, double tokens) {
  return share >= 1 ? 1.0 : 1.0 - std::pow(1.0 - share, tokens);
}

}  // namespace tandem
