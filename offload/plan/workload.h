// What a machine shall be used for, and what is known of the model's routing: the inputs of plan()
// beside the model and the machine.
#pragma once
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "model/config.h"
#include "ops/weight_format.h"

namespace tandem {

enum class Objective {
  kLatency,     // the shortest time for a request among `concurrency` of them
  kThroughput,  // the most tokens a second of all requests
};

struct Workload {
  int64_t context = 8192;  // tokens of KV cache a sequence
  int concurrency = 1;     // sequences at a time; 0: as many as serve the objective best
  int prompt_tokens = 1024, output_tokens = 1024;
  Objective objective = Objective::kLatency;
  double tokens_per_second_per_user = 0;  // wanted at least; 0: any
  std::optional<WeightFormat> experts;    // nothing: as stored, or the largest smaller that fits
  std::optional<DType> kv;  // BF16 or FP8; nothing: BF16, or FP8 where only that keeps it on GPUs
};

// Throws Error naming the figure.
void require_sound(const Workload& workload, const ModelConfig& config);

// How often the router chose each expert of some tokens, as `tandem run --record-routing` counts.
struct RoutingCounts {
  explicit RoutingCounts(const ModelConfig& config);
  std::vector<std::vector<int64_t>> of_layer;  // [layers][experts]; of dense layers none
};
// The text that RoutingStatistics reads. Every MoE layer saw the same tokens, at least one.
std::string routing_statistics_json(const ModelConfig& config, const RoutingCounts& counts);

// Probability that one of `tokens` tokens goes to an expert with this share: model_spec's
// E(1-(1-k/E)^n) for one expert.
double chance_of_use(double share, double tokens);

// How often each expert is chosen, a token: of a layer's experts these add up to n_active.
class RoutingStatistics {
 public:
  // Every expert alike.
  explicit RoutingStatistics(const ModelConfig& config);
  // {"model": shapes, as --record-routing writes them, or missing, "layers": .., "experts": ..,
  // "tokens": .., "counts": [[..] per MoE layer]}. Throws Error when it is broken or of another
  // model.
  RoutingStatistics(const ModelConfig& config, std::string_view json, const std::string& source);

  bool uniform() const { return shares_.empty(); }
  double share(int layer, int expert) const {
    return uniform() ? even_ : shares_[row_of_[layer]][expert];
  }
  // chance_of_use(share(layer, expert), tokens), quickly.
  double chance(int layer, int expert, double tokens) const {
    if (tokens == 1) return share(layer, expert);
    return uniform() ? chance_of_use(even_, tokens)
                     : -std::expm1(tokens * log_rest_[row_of_[layer]][expert]);
  }

 private:
  double even_ = 0;
  std::vector<int> row_of_;                    // [layers] in shares_
  std::vector<std::vector<double>> shares_;    // [MoE layers][experts]; empty: all alike
  std::vector<std::vector<double>> log_rest_;  // log(1 - share)
};

}  // namespace tandem
