// The DeepSeek family in double precision as in the papers (DeepSeek-V2, arXiv 2405.04434, section
// 2; DeepSeek-V3, arXiv 2412.19437, section 2.1): no cache, no absorption, no batch. Shares only
// the config and weight structs with src/; decoding, YaRN and routing are its own, and Eigen
// multiplies.
#pragma once
#include "model/weights.h"
#include "tests/stored_numbers.h"

namespace tandem::test {

// w x
Vec mul(const QuantView& w, const Vec& x);
// Rounds to the nearest E4M3 number, with a scale for each 128 that maps the largest magnitude to
// 448.
Vec rounded_to_e4m3(const Vec& x);

// The model's logits, [token][vocab]. With fp8_activations the inputs of FP8 weights are rounded,
// except latents that are restored to keys and values.
std::vector<Vec> naive_logits(const ModelConfig& config, const ModelWeights& weights,
                              const std::vector<int32_t>& tokens, bool fp8_activations = false);

}  // namespace tandem::test
