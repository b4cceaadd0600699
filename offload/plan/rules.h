// Rules that bound any placement, as formulas of the model's shapes and one device's rates.
#pragma once
#include <optional>
#include <string>

#include "core/machine.h"
#include "model/config.h"

namespace tandem {

// Replicas of the backbone from which each expert's batch is at least one replica's: E / top_k.
double least_dp_for_compute_bound(const ModelConfig& config);
// Expert-parallel ranks beyond this number, routed plus shared experts, have nothing to compute.
int most_useful_ep(const ModelConfig& config);
// Lower bound of a layer's time under any expert parallelism: reading one expert at a byte per
// weight.
double one_expert_read_seconds(const ModelConfig& config, double read_bytes_per_second);
// Tokens per expert at which its arithmetic takes as long as reading it.
double ridge_tokens_per_expert(double ops_per_second, double read_bytes_per_second,
                               double bytes_per_weight);

constexpr int kSplitMultiple = 128;  // columns per scale block and per kernel tile
// Why `width` (of the part called `what`) cannot be split `ways`; empty if it can.
std::optional<std::string> split_refusal(const char* what, int width, int ways);
// The first refused tensor-parallel split of a model; empty if there is none.
std::optional<std::string> tensor_parallel_refusal(const ModelConfig& config, int ways);

}  // namespace tandem
