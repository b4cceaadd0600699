// From the tensors of a checkpoint to the slots of ModelWeights, with every name, shape and type
// checked against the configuration.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "io/weight_store.h"
#include "model/config.h"
#include "model/weights.h"

namespace tandem {

// Views into the mapping (at any address: copy before use as float; read no data through them
// before store.require_unchanged()). Touches no weight data. Throws one Error that names the first
// tensors that are missing, misshapen, of a wrong type, without fitting scales, or not part of the
// model, with expected and found, and how many more there are. MTP layers, buffers of the rotary
// embedding and a head that is tied are passed over. A tied head is the embedding.
ModelWeights stored_weights(const WeightStore& store, const ModelConfig& config);

// What is odd about weights that stored_weights() accepted, a line each: router biases that were
// rounded to 16 bits.
std::vector<std::string> checkpoint_warnings(const ModelWeights& weights);

// Throws Error when a scale (kF32 or kBF16, at any address) is NaN, infinite or negative, naming
// the first.
void check_scales(std::string_view name, const TensorView& scales);

// Throws Error unless the numbers in `shape`, a copy of the tensor's data, are those of the matrix.
void check_int4_shape(const StoredTensor& shape, const std::byte* data, int64_t rows, int64_t cols);

// True for a tensor of the checkpoint that the main model does not use.
bool is_passed_over(std::string_view name, const ModelConfig& config);

}  // namespace tandem
