// Experts that replace the router's choice in measurements: a table of choices for each layer,
// which CPUs and GPUs read alike (simulated_row()), made by offload/simulation/simulated_routing.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace tandem {

struct SimulatedChoices {
  struct Layer {
    int64_t first_row = 0, n_rows = 0;  // n_rows is 0 for layers without experts here
  };
  std::string name;  // as reports name it: "grouped-random"
  int n_experts = 0, n_active = 0;
  bool varies = false;            // simulated_row()
  std::vector<int32_t> ids = {};  // [rows of all layers, n_active], different ones in a row
  std::vector<Layer> layers = {};

  std::span<const int32_t> of_layer(int layer) const {
    const Layer& l = layers[layer];
    return std::span(ids).subspan(l.first_row * n_active, l.n_rows * n_active);
  }
  // [n_experts]: the part of a layer's rows that have each expert.
  std::vector<double> shares(int layer) const;
  // The number of different experts that so many tokens of a step choose in a layer with experts, a
  // mean over layers and steps.
  double expected_experts(double n_tokens) const;
};

}  // namespace tandem
