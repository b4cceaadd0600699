// Checkpoints store the embedding and the head again with every layer for multi-token prediction.
#pragma once
#include "io/weight_store.h"
#include "model/config.h"

namespace tandem {

// Sets config.mtp_has_embedding and mtp_has_head: whether a layer in use has an embedding or a head
// that is not equal to the model's, byte for byte. Reads both with n_threads threads. Throws Error
// when a file cannot be read.
void find_mtp_copies(const WeightStore& store, int n_threads, ModelConfig& config);

}  // namespace tandem
