// What a checkpoint has of layers for multi-token prediction (MTP), and whether they may be used.
#pragma once
#include <string>

#include "io/weight_store.h"
#include "model/weights.h"

namespace tandem {

// Why the checkpoint cannot draft with MTP layers; empty if it has some.
std::string why_no_mtp(const std::string& directory, const WeightStore& store,
                       const ModelConfig& config);

// The part of the host's memory that weights may take with MTP layers that the user has not asked
// for. The cache of files needs the rest.
constexpr double kMostMemoryWithMtp = 0.85;

// The parameters that a draft by the MTP layers reads, over those that a token reads: 0.04 for R1.
double mtp_share(const ModelConfig& config);

// Checkpoints store the embedding and the head again with every MTP layer. Sets
// config.mtp_has_embedding and mtp_has_head: whether a layer in use has an embedding or a head that
// is not equal to the model's, byte for byte. Reads both with n_threads threads. Throws Error when
// a file cannot be read.
void find_mtp_copies(const WeightStore& store, int n_threads, ModelConfig& config);

// stored_weights() of the model with config.n_used_mtp_layers, copies of the embedding and the head
// left out.
ModelWeights stored_with_mtp(const WeightStore& store, int n_threads, ModelConfig& config);

}  // namespace tandem
