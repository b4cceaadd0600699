// Ranks with emulated GPUs, which are threads, and what is placed on them.
#pragma once
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "comm/group.h"
#include "loader/model_options.h"
#include "model/config.h"
#include "offload/plan/placement.h"
#include "tests/hybrid_placements.h"

namespace tandem::test {

// Runs `work` on every rank. What one reports fails the test.
void on_ranks(int n, const std::function<void(Group&)>& work);

// What two ranks say that refuse to load a model.
std::string refusal_of_two(const ModelOptions& options);

// Divided among all GPUs, or `tp` of them for each replica.
Placement backbone_on_gpus(const ModelConfig& c, int n_ranks, int tp = 0);

// All experts in slices on the GPUs of a host.
Placement sliced_placement(const ModelConfig& c, int n_ranks, int tp = 0);

// Experts on the GPUs of a host and on its CPU, in which some layers have none on one of them. In
// some layers several GPUs have the same experts.
Placement random_placement_of_ranks(const ModelConfig& c, int n_ranks, std::mt19937& rng,
                                    bool with_cpu, int tp = 0);

// A text that a golden model has logits of.
std::vector<int32_t> golden_text(const std::string& directory);

// The model on the CPU, with which GPUs are compared.
ModelOptions reference_of(const std::string& directory);

// The model on GPUs of ranks.
ModelOptions as_placed(const std::string& directory, const PlacementFile& file);

}  // namespace tandem::test
