#include "model/simulated_choices.h"

#include <algorithm>
#include <cmath>

namespace tandem {

std::vector<double> SimulatedChoices::shares(int layer) const {
  std::vector<double> shares(n_experts);
  for (const int32_t id : of_layer(layer)) shares[id] += 1;
  for (double& share : shares) share /= static_cast<double>(layers[layer].n_rows);
  return shares;
}

double SimulatedChoices::expected_experts(double n_tokens) const {
  double sum = 0;
  int n_layers = 0;
  for (int layer = 0; layer < static_cast<int>(layers.size()); ++layer) {
    if (layers[layer].n_rows == 0) continue;
    ++n_layers;
    const std::vector<double> all = shares(layer);
    if (varies)
      for (const double share : all) sum += 1 - std::pow(1 - share, n_tokens);
    else  // experts take turns
      sum += std::min(n_tokens * n_active,
                      static_cast<double>(std::count_if(all.begin(), all.end(),
                                                        [](double share) { return share > 0; })));
  }
  return sum / std::max(1, n_layers);
}

}  // namespace tandem
