// Maps the tensors of a checkpoint to the members of ModelWeights and checks every name, shape and
// type against the configuration.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "io/weight_store.h"
#include "model/config.h"
#include "model/weights.h"

namespace tandem {

// Returns views into the mapped files. Their data is unaligned (copy before use as float) and may
// be read only after store.require_unchanged(). Touches no weight data. Throws one Error that names
// the first tensors that are missing, not part of the model, without fitting scales, or of a wrong
// shape or type (with expected and found), and the number of further ones. MTP layers that are not
// in use, buffers of the rotary embedding and the stored copy of a tied head are ignored; a tied
// head is the embedding.
ModelWeights stored_weights(const WeightStore& store, const ModelConfig& config);

// Warnings about weights that stored_weights() accepted, one line each: router biases stored in 16
// bits.
std::vector<std::string> checkpoint_warnings(const ModelWeights& weights);

// Throws Error naming the first scale that is NaN, infinite or negative. `scales` is kF32 or kBF16
// and may be unaligned.
void check_scales(std::string_view name, const TensorView& scales);

// Throws Error unless the INT4 shape tensor (name_shape) is [rows, cols]. `data` is a copy of its
// data.
void check_int4_shape(const StoredTensor& shape, const std::byte* data, int64_t rows, int64_t cols);

// True for a tensor of the checkpoint that is not used.
bool is_passed_over(std::string_view name, const ModelConfig& config);

}  // namespace tandem
