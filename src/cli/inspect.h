// The report of `tandem inspect`: a checkpoint's configuration, its parameters and bytes by class.
// Reads headers only, never weights.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "io/weight_store.h"
#include "model/config.h"

namespace tandem {

// Throws Error when the store does not hold the model that `config` describes (stored_weights).
// Sizes are in bytes; field names are those of `tandem inspect --json`.
nlohmann::ordered_json inspect_report(const ModelConfig& config, const WeightStore& store,
                                      bool list_tensors = false);

// The report as plain text of at most 79 columns (names of tensors apart).
std::string inspect_text(const nlohmann::ordered_json& report);

}  // namespace tandem
