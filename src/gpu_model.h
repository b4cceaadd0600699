// A checkpoint made ready to run with its backbone on a GPU. src/with_gpu implements it;
// src/without_gpu takes its place where the program is built without CUDA. The link decides.
#pragma once
#include <memory>
#include <string>

#include "engine/step_runner.h"
#include "io/load_jobs.h"
#include "io/weight_store.h"
#include "load_weights.h"
#include "offload/cpu_experts.h"
#include "offload/plan/executed_parts.h"
#include "offload/plan/workload.h"
#include "offload/timeline.h"

namespace tandem {

struct GpuModelOptions {
  int max_tokens = 1;   // of a step
  int max_logits = 1;   // of a step
  int64_t context = 0;  // tokens of a sequence
  // Of KV cache, for all sequences: at least one context, and more as this part of the memory that
  // is left allows, at most so many tokens.
  double kv_fraction = 0;
  int64_t most_kv_tokens = 0;
  DType cache_type = DType::kBF16;  // or kF8E4M3
  bool fp8_activations = false;     // in products of many tokens with FP8 weights
  int n_threads = 1;                // that load
  bool records = true;              // decode steps become graphs
  LoadProgress progress = {};
};

// Owns what computes on the card.
class GpuModel {
 public:
  virtual ~GpuModel() = default;
  virtual const std::string& card() const = 0;  // its name
  virtual const ModelWeights& weights() const = 0;
  virtual const LoadReport& report() const = 0;
  virtual Device& device() = 0;
  virtual Ops& ops() = 0;
  // Of the card, and once they are added, of the CPU: those that are not on the card, or none.
  virtual ExpertPool& experts() = 0;
  // Both outlive the object; the timeline may be null.
  virtual void add_cpu_experts(CpuExperts& experts, Timeline* timeline) = 0;
  // From now on, once all experts are added.
  virtual void record_routing() = 0;
  virtual const RoutingCounts* routing() const = 0;  // null: not recorded
};

// Why no model can run on a GPU here, in one line; empty: one can.
std::string why_no_gpu();
// Of the GPU that would be used. Throws Error when there is none.
Gpu this_gpu();

// Throws Error where the GPU that would be used does not multiply FP8 by FP8, for --activations
// fp8.
void require_fp8_card();

struct CardShare {
  CardParts parts;
  int64_t kv_tokens;  // of the cache
};

// What the card gets: what `placed` says, or else as much as fits it: all of the model, or the
// backbone, some cache for more sequences than one and as many experts as possible. `stored`:
// stored_weights(). Throws Error when its memory is too small or its kernels do not take the model;
// nothing is loaded.
CardShare choose_card_share(ModelWeights& stored, const ModelConfig& config,
                            const GpuModelOptions& options, const std::optional<CardParts>& placed);

// `config` outlives the model. Throws Error when no GPU can be used.
std::unique_ptr<GpuModel> load_gpu_model(const WeightStore& store, ModelWeights& stored,
                                         const ModelConfig& config, const GpuModelOptions& options,
                                         const CardParts& parts);

}  // namespace tandem
