#include "with_gpu/gpu_expert_slots.h"

#include <algorithm>
#include <set>

#include "core/clock.h"
#include "with_gpu/upload_jobs.h"

namespace tandem {
namespace {

constexpr int kMatrices = 3;
constexpr const char* kNames[kMatrices] = {"gate_proj", "up_proj", "down_proj"};

}  // namespace

GpuExpertSlots::GpuExpertSlots(std::shared_ptr<OpenCheckpoint> checkpoint,
                               const ModelConfig& config, ModelWeights& model,
                               std::vector<std::vector<int32_t>> places, gpu::Stream& stream, int n)
    : checkpoint_(std::move(checkpoint)), c_(config), model_(model), stream_(stream) {
  check(model.slices.empty(), "experts are whole");
  memory_.allocate(bytes_for(checkpoint_->stored, n));
  layers_.resize(places.size());
  for (size_t l = 0; l < places.size(); ++l) {
    Layer& layer = layers_[l];
    layer.places = std::move(places[l]);
    for (size_t e = 0; e < layer.places.size(); ++e) {
      if (layer.places[e] < 0) continue;
      check(layer.places[e] == std::ssize(layer.slots), "slots in the order of their experts");
      layer.slots.push_back(model.layers[l].experts[e]);
    }
  }
}

int64_t GpuExpertSlots::bytes_for(const ModelWeights& stored, int n) {
  int64_t largest = 0;
  for (const LayerWeights& layer : stored.layers)
    for (const FfnWeights& e : layer.experts)
      largest = std::max(largest, CudaWeights::bytes_of(e.gate, WeightUse::kExpert) +
                                      CudaWeights::bytes_of(e.up, WeightUse::kExpert) +
                                      CudaWeights::bytes_of(e.down, WeightUse::kExpert));
  return n * largest;
}

int64_t GpuExpertSlots::load(std::span<const ExpertId> experts, const LoadOptions& options,
                             double& seconds) {
  check(loaded_.empty(), "one load at a time");
  memory_.clear();
  std::vector<LoadJob> jobs;
  for (const ExpertId id : experts) {
    FfnWeights stored = checkpoint_->stored.layers[id.layer].experts[id.expert];
    Loaded& loaded = loaded_.emplace_back(Loaded{id, {}});
    for (int i = 0; i < kMatrices; ++i) {
      const QuantView& whole = *matrix(stored, i);
      QuantView& to = *matrix(loaded.at, i);
      to = memory_.reserve(whole, WeightUse::kExpert);
      add_upload_jobs(
          memory_,
          {fmt::format("model.layers.{}.mlp.experts.{}.{}.weight", id.layer, id.expert, kNames[i]),
           whole, whole, 0, to},
          jobs);
    }
  }
  int64_t bytes = 0;
  for (const LoadJob& job : jobs) bytes += job.bytes;
  try {
    if (!jobs.empty()) run_load_jobs(checkpoint_->store->files(), std::move(jobs), options);
    const auto start = Clock::now();
    memory_.finish();
    seconds = seconds_since(start);
  } catch (...) {
    memory_.finish();  // copies that were enqueued
    drop();
    throw;
  }
  return bytes;
}

void GpuExpertSlots::drop() { loaded_.clear(); }

void GpuExpertSlots::exchange(std::span<const ExpertId> leaving, int32_t place,
                              const Changed& changed) {
  std::set<int> layers;
  for (const ExpertId id : leaving) {
    int32_t& of_expert = layers_[id.layer].places[id.expert];
    layers_[id.layer].free.push_back(of_expert);
    of_expert = place;
    model_.layers[id.layer].experts[id.expert] = {};
    layers.insert(id.layer);
  }
  for (Loaded& loaded : loaded_) {
    Layer& layer = layers_[loaded.id.layer];
    check(!layer.free.empty(), "a slot for the expert that comes");
    const int32_t slot = layer.free.back();
    layer.free.pop_back();
    layer.places[loaded.id.expert] = slot;
    FfnWeights& to = layer.slots[slot];
    for (int i = 0; i < kMatrices; ++i) {
      const QuantView &from = *matrix(loaded.at, i), &there = *matrix(to, i);
      stream_.copy(from.q.data, from.q.rows * from.q.row_bytes(), there.q.data);
      if (!from.scale.empty())
        stream_.copy(from.scale.data, from.scale.rows * from.scale.row_bytes(), there.scale.data);
    }
    model_.layers[loaded.id.layer].experts[loaded.id.expert] = to;
    layers.insert(loaded.id.layer);
  }
  loaded_.clear();
  for (const int layer : layers) changed(layer, layers_[layer].places);
  stream_.wait();  // the spare memory is overwritten next
}

}  // namespace tandem
