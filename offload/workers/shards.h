// Shards: sets of experts that always answer together, whichever of their owners computes them. A
// token's sum is added up within a layer's part of a shard first and then over the shards, so its
// bits depend on which experts the workers have, and not on which worker answers.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "transport/expert_messages.h"

namespace tandem {

struct Shard {
  std::vector<std::vector<int>> experts;  // [layers] ascending
  std::vector<int> owners;  // numbers of workers, ascending; empty: the backbone has them
};

// Divides the n_experts experts of n_layers layers into the fewest shards whose experts have the
// same owners, in ascending order of their first expert in the first layer that has any. owned:
// [workers][at least n_layers][n_experts].
std::vector<Shard> shards_of(const std::vector<ExpertsOfLayers>& owned, int n_layers,
                             int n_experts);

// The numbers of the experts that are there in any layer, ascending.
std::vector<int> in_any_layer(const ExpertsOfLayers& experts);
std::vector<int> in_any_layer(const Shard& shard);
// The same as text, with ", not all in every layer" where layers differ.
std::string text_of_layers(const ExpertsOfLayers& experts);
std::string text_of_shard(const Shard& shard);
// Whether any expert of any layer is true, and how many of all layers are.
bool has_any(const ExpertsOfLayers& experts);
int64_t n_of_all_layers(const ExpertsOfLayers& experts);
// Adds the experts of one to the other, which may be empty, and leaves them out.
void add_layers(const ExpertsOfLayers& experts, ExpertsOfLayers& to);
ExpertsOfLayers layers_without(ExpertsOfLayers experts, const ExpertsOfLayers& others);
// Those that are in both.
ExpertsOfLayers common_layers(const ExpertsOfLayers& a, const ExpertsOfLayers& b);
// Those of n_layers layers that the shard has, [n_layers][n_experts].
ExpertsOfLayers experts_of_shard(const Shard& shard, int n_layers, int n_experts);
// Whether `experts` has one of the shard's experts in its layer.
bool has_one_of(const ExpertsOfLayers& experts, const Shard& shard);

// The numbers of those that are true, ascending.
std::vector<int> listed(const std::vector<bool>& experts);

// "0-3,8" for {0, 1, 2, 3, 8}; the inverse throws Error, naming `option`, for text that is no list
// of numbers and ranges below n_experts. "auto" is all experts.
std::string text_of_experts(const std::vector<int>& experts);
std::vector<bool> experts_from_text(const std::string& text, int n_experts,
                                    const std::string& option);

}  // namespace tandem
