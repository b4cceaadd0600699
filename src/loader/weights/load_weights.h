// Loads the weights of a checkpoint in the kernels' layout: from a valid packed cache if there is
// one, else from the checkpoint.
#pragma once
#include <functional>
#include <string>

#include "io/load_jobs.h"
#include "io/weight_store.h"
#include "loader/weights/model_cache.h"
#include "model/weights.h"
#include "ops/cpu_weights.h"

namespace tandem {

struct LoadPlan {
  PackedLayout layout;
  std::string cache_directory;  // empty: no cache
  CacheUse cache_use = CacheUse::kRead;
  int n_threads = 1;
  LoadProgress progress = {}, write_progress = {};
  std::function<void(const std::string&)> warn = [](const std::string&) {};  // called with one line
};

struct LoadReport {
  double seconds = 0;
  int64_t bytes = 0;         // read, from the checkpoint or from the packed cache
  std::string cache = {};    // path of the packed cache that was read or written; empty: none
  bool from_cache = false;   // whether that cache was read
  double write_seconds = 0;  // to write the cache
  double bytes_per_second() const { return seconds > 0 ? static_cast<double>(bytes) / seconds : 0; }
};

struct LoadedWeights {
  ModelWeights weights;  // views into `home`
  LoadReport report;
};

// `stored`: stored_weights() of `store` and `config`. Throws Error for invalid scales
// (load_jobs()), too little memory, and with CacheUse::kRequire for a cache that cannot be written.
// An invalid cache causes a warning and is packed again.
LoadedWeights load_weights(const WeightStore& store, ModelWeights& stored,
                           const ModelConfig& config, const LoadPlan& plan, CpuWeights& home);

// For threads that load while others compute: the calling thread leaves the cores to those, but
// for about a tenth of one. A refusal by the system costs speed only.
void load_beside_steps();
// Thrown by the LoadProgress of a load that is no longer wanted.
struct LoadGivenUp {};

}  // namespace tandem
