// The intended use of a machine, and statistics of the model's routing: the inputs of plan()
// besides model and machine.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "core/row_format.h"
#include "model/batch.h"
#include "model/config.h"
#include "model/weight_format.h"

namespace tandem {

enum class Objective {
  kLatency,     // the shortest time of a request among `concurrency` of them
  kThroughput,  // the most tokens per second of all requests
};

struct Workload {
  int64_t context = 8192;  // KV cache tokens per sequence
  int concurrency = 1;     // concurrent sequences; 0: as many as serve the objective best
  int prompt_tokens = 1024, output_tokens = 1024;
  Objective objective = Objective::kLatency;
  double tokens_per_second_per_user = 0;  // minimum; 0: any
  double first_token_seconds = 0;         // maximum for one request; 0: any
  std::optional<WeightFormat> experts;    // empty: as stored, or the widest that fits
  // BF16 or FP8; empty: BF16, or FP8 where only FP8 keeps the cache on GPUs.
  std::optional<DType> kv;
  // Replicas of experts a layer, beyond one of each, where several ranks have experts; empty:
  // decided. More than none asks for several ranks.
  std::optional<int> redundant_experts;
  ExpertRows expert_rows = ExpertRows::kExact;  // between ranks, where rows travel
  bool experts_move = false;        // while a server answers, where a placement allows it
  std::optional<int> draft_tokens;  // of a sequence per step, 0: none; empty: decided
  double acceptance = 0.85;         // probability that a draft is accepted if all before it were
};

// A workload that comparisons of systems agree on.
struct WorkloadPreset {
  const char* name;
  int input_tokens, output_tokens;
  std::array<int, 3> concurrency;
};
// isl1k-osl1k: 1,000 and 1,000 tokens, 8, 64 and 2,048 sequences. Throws Error for other names.
const WorkloadPreset& workload_preset(const std::string& name);

// Throws Error naming the wrong value.
void require_sound(const Workload& workload, const ModelConfig& config);

// How often the router chose each expert, as counted by `tandem run --record-routing`.
struct RoutingCounts {
  explicit RoutingCounts(const ModelConfig& config);
  std::vector<std::vector<int64_t>> of_layer;  // [layers][experts]; empty for dense layers
  // [n - 1]: the windows of n neighbouring tokens in all MoE layers, and the sum of the numbers of
  // different experts that each window chose.
  struct Windows {
    int64_t n = 0, experts = 0;
  };
  std::array<Windows, kMaxDraftTokens + 1> neighbours;
};
// JSON that RoutingStatistics reads. Every MoE layer must have seen the same tokens, at least one.
std::string routing_statistics_json(const ModelConfig& config, const RoutingCounts& counts);

// Probability that at least one of `tokens` tokens chooses an expert of this share: 1 - (1 - k/E)^n
// under even routing.
double chance_of_use(double share, double tokens);

constexpr int64_t kMaxStatisticsBytes = 256 << 20;  // of a file of them

// How often each expert is chosen per token: the shares of a layer's experts add up to n_active.
class RoutingStatistics {
 public:
  // Even routing, or that of simulated choices (RouterConfig::simulated).
  explicit RoutingStatistics(const ModelConfig& config);
  // Reads {"model": shapes as --record-routing writes them (optional), "layers": .., "experts": ..,
  // "tokens": .., "experts_of_neighbours": [mean number of different experts that n = 1, 2, ..
  // neighbouring tokens choose in a layer] (optional), "counts": [[..] per MoE layer]}, or what a
  // server's GET /experts answers. Throws Error when the text is malformed or describes another
  // model.
  RoutingStatistics(const ModelConfig& config, std::string_view json, const std::string& source);

  bool knows_neighbours() const { return !independent_.empty(); }
  // The number of independently routed tokens that are expected to choose as many different experts
  // as n neighbouring tokens of a text: measured if the statistics have it, else n.
  double independent_tokens(int n) const {
    if (!knows_neighbours()) return n;
    const int known = std::min<int>(n, static_cast<int>(independent_.size()));
    return independent_[known - 1] * n / known;
  }

  bool uniform() const { return shares_.empty(); }
  double share(int layer, int expert) const {
    return uniform() ? even_ : shares_[row_of_[layer]][expert];
  }
  // chance_of_use(share(layer, expert), tokens), from precomputed logarithms.
  double chance(int layer, int expert, double tokens) const {
    if (n_in_turns_ > 0) return std::min(n_in_turns_, tokens * n_active_) / n_experts_;
    if (tokens == 1) return share(layer, expert);
    return uniform() ? chance_of_use(even_, tokens)
                     : -std::expm1(tokens * log_rest_[row_of_[layer]][expert]);
  }

 private:
  void add_layer(int layer, std::vector<double> shares);
  void read_neighbours(const nlohmann::json& means, const std::string& source);
  double mean_different(double tokens) const;

  double even_ = 0;
  double n_active_ = 0, n_experts_ = 0;
  double n_in_turns_ = 0;    // experts that simulated choices use in turns; 0: routing is random
  std::vector<int> row_of_;  // [layers] row in shares_
  std::vector<std::vector<double>> shares_;    // [MoE layers][experts]; empty: even
  std::vector<std::vector<double>> log_rest_;  // log(1 - share)
  std::vector<double> independent_;  // [n - 1]: independent_tokens(n); empty: not measured
};

}  // namespace tandem
