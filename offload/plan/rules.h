// Rules that bound any placement, each a formula of the model's shapes and one device's rates.
#pragma once
#include <optional>
#include <string>

#include "core/machine.h"
#include "model/config.h"

namespace tandem {

// Replicas of the backbone from which on an expert's batch is at least one replica's: E / top_k.
double least_dp_for_compute_bound(const ModelConfig& config);
// More ranks than routed experts and the shared one have nothing of their own to compute.
int most_useful_ep(const ModelConfig& config);
// Below this no amount of expert parallelism brings a layer: reading one expert, a byte a weight.
double one_expert_read_seconds(const ModelConfig& config, double read_bytes_per_second);
// Tokens an expert must get before its arithmetic takes as long as reading it.
double ridge_tokens_per_expert(double ops_per_second, double read_bytes_per_second,
                               double bytes_per_weight);

constexpr int kSplitMultiple = 128;  // columns of a scale block and of a kernel's tile
// Why `width` (of the part called `what`) cannot be cut `ways`; nothing: it can.
std::optional<std::string> split_refusal(const char* what, int width, int ways);
// The first of a model's tensor-parallel splits that is refused.
std::optional<std::string> tensor_parallel_refusal(const ModelConfig& config, int ways);

}  // namespace tandem
