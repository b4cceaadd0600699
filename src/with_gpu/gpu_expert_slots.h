// The places of routed experts in GPU memory, which experts take from each other while the model
// runs: those that come are loaded into spare memory beside the steps, and copied between two.
#pragma once
#include <functional>
#include <span>
#include <vector>

#include "loader/weights/spare_experts.h"
#include "ops/cuda_weights.h"

namespace tandem {

class GpuExpertSlots {
 public:
  // Spare memory for n experts. places: [layers][n_experts] as ExpertPlaces takes them, of `model`,
  // whose experts are on the GPU. `stream` is that of the steps. References outlive the object.
  GpuExpertSlots(std::shared_ptr<OpenCheckpoint> checkpoint, const ModelConfig& config,
                 ModelWeights& model, std::vector<std::vector<int32_t>> places, gpu::Stream& stream,
                 int n);
  // Bytes of the spare memory.
  static int64_t bytes_for(const ModelWeights& stored, int n);

  bool has(ExpertId id) const { return layers_[id.layer].places[id.expert] >= 0; }
  // Beside the steps: loads experts. Returns the bytes that were read; `seconds` is the time of the
  // last copies to the GPU. Throws Error as SpareExperts::load(). Then, and by drop(), nothing is
  // loaded.
  int64_t load(std::span<const ExpertId> experts, const LoadOptions& options, double& seconds);
  void drop();
  // Between steps: what was loaded takes the slots of experts that leave, which are at `place` from
  // now on, and of those that have left before. Calls changed(layer, places) for each layer.
  using Changed = std::function<void(int layer, std::span<const int32_t> places)>;
  void exchange(std::span<const ExpertId> leaving, int32_t place, const Changed& changed);

 private:
  struct Loaded {
    ExpertId id;
    FfnWeights at;  // in the spare memory
  };
  struct Layer {
    std::vector<FfnWeights> slots;
    std::vector<int32_t> places;  // [n_experts]
    std::vector<int32_t> free;    // slots that no expert has
  };
  static QuantView* matrix(FfnWeights& expert, int i) {
    return i == 0 ? &expert.gate : i == 1 ? &expert.up : &expert.down;
  }

  const std::shared_ptr<OpenCheckpoint> checkpoint_;
  const ModelConfig& c_;
  ModelWeights& model_;
  gpu::Stream& stream_;
  CudaWeights memory_;
  std::vector<Layer> layers_;
  std::vector<Loaded> loaded_;
};

}  // namespace tandem
