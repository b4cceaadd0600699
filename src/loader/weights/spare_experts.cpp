#include "loader/weights/spare_experts.h"

#include <algorithm>
#include <utility>

namespace tandem {
namespace {

struct Kinds {
  std::vector<int> of_layer;        // [layers] -1: dense
  std::vector<int> first_layer;     // [kinds]
  std::vector<ExpertShape> shapes;  // [kinds]
};

Kinds kinds_of(ModelWeights& stored, const ModelConfig& config, const CpuWeights& home,
               const ExpertsLayout& experts, const std::vector<Slice>& slices) {
  Kinds kinds;
  std::vector<ExpertShape> all = expert_shapes(stored, config, home, experts, slices);
  for (int layer = 0; layer < config.n_all_layers(); ++layer) {
    kinds.of_layer.push_back(-1);
    if (!config.is_moe(layer)) continue;
    const auto found = std::find(kinds.shapes.begin(), kinds.shapes.end(), all[layer]);
    kinds.of_layer.back() = static_cast<int>(found - kinds.shapes.begin());
    if (found != kinds.shapes.end()) continue;
    kinds.first_layer.push_back(layer);
    kinds.shapes.push_back(std::move(all[layer]));
  }
  return kinds;
}

}  // namespace

int most_of_layer(const ExpertsLayout& layout, const ModelConfig& config) {
  int most = layout.elsewhere().experts.empty() ? config.router.n_experts : 0;
  for (const std::vector<bool>& elsewhere : layout.elsewhere().experts)
    most = std::max(most, static_cast<int>(std::count(elsewhere.begin(), elsewhere.end(), false)));
  return most;
}

SpareExperts::SpareExperts(std::shared_ptr<OpenCheckpoint> checkpoint, const ModelConfig& config,
                           const PackedLayout& layout, const Topology& topology,
                           const ModelWeights& model, int n)
    : checkpoint_(std::move(checkpoint)),
      c_(config),
      layout_(layout),
      slices_(model.slices),
      memory_(layout.kernels, topology) {
  ModelWeights& stored = checkpoint_->stored;
  Kinds kinds = kinds_of(stored, c_, memory_, layout_.experts, slices_);
  std::vector<int64_t> bytes(memory_.n_regions());
  for (const ExpertShape& shape : kinds.shapes)
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] += n * shape.region_bytes[i];
  memory_.allocate(bytes);
  for (const int layer : kinds.first_layer)
    free_.push_back(reserve_experts(stored, c_, memory_, {layout_.experts, slices_, layer}, n));
  kind_ = std::move(kinds.of_layer);
}

int64_t SpareExperts::bytes_for(ModelWeights& stored, const ModelConfig& config,
                                const CpuWeights& home, const ExpertsLayout& experts, int n) {
  const std::vector<Slice> slices = expert_slices(stored, config, home, experts);
  int64_t bytes = 0;
  for (const ExpertShape& shape : kinds_of(stored, config, home, experts, slices).shapes)
    for (const int64_t of_region : shape.region_bytes) bytes += n * of_region;
  return bytes;
}

bool SpareExperts::has_room(std::span<const ExpertId> experts) const {
  std::vector<size_t> n(free_.size());
  for (const ExpertId id : experts)
    if (++n[kind_[id.layer]] > free_[kind_[id.layer]].size()) return false;
  return true;
}

int64_t SpareExperts::load(std::span<const ExpertId> experts, const LoadOptions& options) {
  check(loaded_.empty(), "one load at a time");
  ModelWeights places;
  places.slices = slices_;
  places.layers.resize(c_.n_all_layers());
  const int n_experts = c_.router.n_experts;
  for (const ExpertId id : experts) {
    std::vector<Place>& free = free_[kind_[id.layer]];
    check(!free.empty(), "room for the experts of a wave");
    loaded_.push_back({id, std::move(free.back())});
    free.pop_back();
    const Place& place = loaded_.back().place;
    std::vector<FfnWeights>& of_layer = places.layers[id.layer].experts;
    of_layer.resize(place.size() * n_experts);
    for (size_t slice = 0; slice < place.size(); ++slice)
      of_layer[slice * n_experts + id.expert] = place[slice];
  }
  int64_t bytes = 0;
  try {
    const PackedModel model =
        packed_experts(checkpoint_->stored, c_, layout_.experts, std::move(places));
    PackJobs jobs = load_jobs(model, memory_);
    for (std::vector<LoadJob>* part : {&jobs.first, &jobs.rest}) {
      for (const LoadJob& job : *part) bytes += job.bytes;
      if (!part->empty()) run_load_jobs(checkpoint_->store->files(), std::move(*part), options);
    }
  } catch (...) {
    drop();
    throw;
  }
  return bytes;
}

void SpareExperts::drop() {
  for (Loaded& loaded : loaded_) free_[kind_[loaded.id.layer]].push_back(std::move(loaded.place));
  loaded_.clear();
}

void SpareExperts::exchange(std::span<const ExpertId> leaving, ModelWeights& model) {
  const auto expert = [&](ExpertId id, size_t slice) -> FfnWeights& {
    return model.layers[id.layer].experts[slice * c_.router.n_experts + id.expert];
  };
  for (const Loaded& loaded : loaded_)
    for (size_t slice = 0; slice < loaded.place.size(); ++slice)
      expert(loaded.id, slice) = loaded.place[slice];
  loaded_.clear();
  for (const ExpertId id : leaving) {
    Place place;
    for (size_t slice = 0; slice < std::max<size_t>(slices_.size(), 1); ++slice)
      place.push_back(std::exchange(expert(id, slice), {}));
    free_[kind_[id.layer]].push_back(std::move(place));
  }
}

}  // namespace tandem
