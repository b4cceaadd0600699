// Rotary position embedding with YaRN (Peng et al. 2023), as DeepSeek applies it: with a static
// factor, at every position.
#pragma once
#include <vector>

#include "model/config.h"

namespace tandem {

// Angular frequency of each of the rope_dim / 2 pairs, in radians per token.
std::vector<float> rope_frequencies(const RopeConfig& rope, int rope_dim);

// Factor of cos and sin; 1 for all released models.
float rope_amplitude(const RopeConfig& rope);

// Factor of q.k: qk_dim^-1/2 * m^2, where m grows with the YaRN factor (DeepSeek-V2 paper,
// section 3.1.4).
float softmax_scale(const ModelConfig& config);

}  // namespace tandem
