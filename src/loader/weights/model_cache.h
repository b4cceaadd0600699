// The packed cache of a model: the path of its file and everything that its bytes depend on
// (docs/packed_cache.md).
#pragma once
#include <string>

#include "core/topology.h"
#include "cpu_kernels/kernels.h"
#include "io/weight_store.h"
#include "model/experts_layout.h"

namespace tandem {

enum class CacheUse {
  kRead,     // read an existing cache; repack an invalid one
  kWrite,    // also create a missing one; warn if that fails
  kRequire,  // like kWrite, but fail with an error
};

// The form in which weights are kept.
struct PackedLayout {
  const cpu::KernelTable& kernels;
  ExpertsLayout experts = {};
};

// XDG_CACHE_HOME/tandem, or .cache/tandem in the home directory; empty if both are unknown.
std::string default_cache_directory();

// One file per model directory and layout; a new cache replaces the old one.
std::string packed_cache_path(const std::string& cache_directory,
                              const std::string& model_directory, const PackedLayout& layout);

// A checksum of every tensor's name, type, shape and position in its file.
uint64_t tensors_checksum(const WeightStore& store);

// Lines that identify the packed bytes: the layout, the expert slices, config.json, every tensor's
// name, type, shape and position, and every file's name, size and modification time. Opens
// config.json; reads no weights.
std::string packed_cache_key(const WeightStore& store, const PackedLayout& layout,
                             const std::vector<Slice>& slices);

}  // namespace tandem
