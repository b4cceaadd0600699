// Brings the weights of a checkpoint into memory as the kernels want them: from the packed cache
// where there is a sound one, else from the checkpoint itself.
#pragma once
#include <functional>
#include <string>

#include "io/load_jobs.h"
#include "io/weight_store.h"
#include "model/weights.h"
#include "model_cache.h"
#include "ops/cpu_weights.h"

namespace tandem {

struct LoadPlan {
  PackedLayout layout;
  std::string cache_directory;  // empty: no cache
  CacheUse cache_use = CacheUse::kRead;
  int n_threads = 1;
  LoadProgress progress = {}, write_progress = {};
  std::function<void(const std::string&)> warn = [](const std::string&) {};  // takes one line
};

struct LoadReport {
  double seconds = 0;
  int64_t bytes = 0;         // read, from the checkpoint or from the packed cache
  std::string cache = {};    // the packed cache that was read or written; empty: none
  bool from_cache = false;   // it was read
  double write_seconds = 0;  // for writing it
  double bytes_per_second() const { return seconds > 0 ? static_cast<double>(bytes) / seconds : 0; }
};

struct LoadedWeights {
  ModelWeights weights;  // views into `home`
  LoadReport report;
};

// `stored`: stored_weights() of both. Throws Error for scales that are no numbers, too little
// memory, and with CacheUse::kRequire for a cache that cannot be written. A cache that is not sound
// is a warning; it is packed again.
LoadedWeights load_weights(const WeightStore& store, ModelWeights& stored,
                           const ModelConfig& config, const LoadPlan& plan, CpuWeights& home);

}  // namespace tandem
