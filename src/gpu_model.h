// A checkpoint made ready to run on a GPU. src/with_gpu implements it; src/without_gpu takes its
// place where the program is built without CUDA. The link decides.
#pragma once
#include <memory>
#include <string>

#include "engine/deepseek.h"
#include "io/load_jobs.h"
#include "io/weight_store.h"
#include "load_weights.h"

namespace tandem {

struct GpuModelOptions {
  int max_tokens = 1;   // of a step
  int max_logits = 1;   // of a step
  int64_t context = 0;  // tokens of KV cache
  int n_threads = 1;    // that load
  bool records = true;  // decode steps become graphs
  LoadProgress progress = {};
};

// Owns what computes on the card.
class GpuModel {
 public:
  virtual ~GpuModel() = default;
  virtual const std::string& card() const = 0;  // its name
  virtual const ModelWeights& weights() const = 0;
  virtual const LoadReport& report() const = 0;
  virtual Ops& ops() = 0;
  virtual RoutedExperts& experts() = 0;
};

// Why no model can run on a GPU here, in one line; empty: one can.
std::string why_no_gpu();

// `stored`: stored_weights() of both; `config` outlives the model. Throws Error when no GPU can be
// used, or when its memory is too small, before anything is loaded.
std::unique_ptr<GpuModel> load_gpu_model(const WeightStore& store, ModelWeights& stored,
                                         const ModelConfig& config, const GpuModelOptions& options);

}  // namespace tandem
