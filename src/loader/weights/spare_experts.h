// Room in host memory for experts that come to this rank while its model runs. Experts that leave
// give their memory to those that come after them, so the room never grows.
#pragma once
#include <memory>
#include <span>
#include <vector>

#include "io/weight_store.h"
#include "loader/weights/load_weights.h"
#include "loader/weights/pack_weights.h"

namespace tandem {

struct ExpertId {
  int layer, expert;
};

// The most experts of a layer that are kept here.
int most_of_layer(const ExpertsLayout& layout, const ModelConfig& config);

// An opened checkpoint.
struct OpenCheckpoint {
  std::unique_ptr<WeightStore> store;
  ModelWeights stored;  // stored_weights() of it
};

class SpareExperts {
 public:
  // Room for n experts of each layer of `model`, which is packed in this layout. References outlive
  // the object. Throws Error for too little memory.
  SpareExperts(std::shared_ptr<OpenCheckpoint> checkpoint, const ModelConfig& config,
               const PackedLayout& layout, const Topology& topology, const ModelWeights& model,
               int n);
  // Bytes of that room.
  static int64_t bytes_for(ModelWeights& stored, const ModelConfig& config, const CpuWeights& home,
                           const ExpertsLayout& experts, int n);

  bool has_room(std::span<const ExpertId> experts) const;  // while nothing is loaded
  // Reads experts and packs them, beside steps that use the model. Returns the bytes that were
  // read. Throws Error for a checkpoint that has changed, invalid scales and a disk that fails, and
  // what progress throws, which stops it. Then, and by drop(), nothing is loaded.
  int64_t load(std::span<const ExpertId> experts, const LoadOptions& options);
  void drop();
  // Between steps: `model` has what was loaded, and no longer the experts that leave.
  void exchange(std::span<const ExpertId> leaving, ModelWeights& model);

 private:
  using Place = std::vector<FfnWeights>;  // [slices] memory of an expert
  struct Loaded {
    ExpertId id;
    Place place;
  };

  const std::shared_ptr<OpenCheckpoint> checkpoint_;
  const ModelConfig& c_;
  const PackedLayout layout_;
  const std::vector<Slice> slices_;
  CpuWeights memory_;
  std::vector<int> kind_;                 // [layers] layers of a kind share their places; -1: dense
  std::vector<std::vector<Place>> free_;  // [kinds]
  std::vector<Loaded> loaded_;
};

}  // namespace tandem
