// The packed cache of one model: where its file lies and everything its bytes depend on
// (docs/packed_cache.md).
#pragma once
#include <string>

#include "core/topology.h"
#include "cpu_kernels/kernels.h"
#include "io/weight_store.h"
#include "ops/experts_layout.h"

namespace tandem {

enum class CacheUse {
  kRead,     // where there is one; one that is not sound is made anew
  kWrite,    // and make it where there is none; a place that cannot be written is a warning
  kRequire,  // the same, as an error
};

// In which form the weights are kept.
struct PackedLayout {
  const cpu::KernelTable& kernels;
  ExpertsLayout experts = {};
};

// XDG_CACHE_HOME/tandem, or .cache/tandem in the home directory; empty when neither is known.
std::string default_cache_directory();

// One file for each model directory and layout: what replaces a cache takes its place.
std::string packed_cache_path(const std::string& cache_directory,
                              const std::string& model_directory, const PackedLayout& layout);

// Lines that name the packed bytes: the layout, how experts are cut, config.json, every tensor's
// name, type, shape and place, and each file's name, size and time of change. Opens config.json;
// reads no weights.
std::string packed_cache_key(const WeightStore& store, const PackedLayout& layout,
                             const std::vector<Slice>& slices);

}  // namespace tandem
