// A number by which two processes know that they have the same model.
#pragma once
#include <cstdint>

#include "io/weight_store.h"

namespace tandem {

// A checksum of config.json, of the names, types and shapes of all tensors in the order of their
// names, and of some bytes of some of them. Copies of a checkpoint have the same, however it is
// divided into files. Throws Error when config.json cannot be read.
uint64_t model_identity(const WeightStore& store);

}  // namespace tandem
