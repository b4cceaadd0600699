#include "offload/gpu/cuda_experts.h"

#include <algorithm>

#include "gpu_kernels/products/plain_products.h"
#include "ops/cuda_products.h"
#include "ops/cuda_weights.h"

namespace tandem {
namespace {

constexpr int kBlockCols = 64;  // scale block columns for tensor core kernels

// One matrix of all experts of a layer, which are equally spaced in memory.
gpu::ExpertWeights all_of(const std::vector<FfnWeights>& experts, QuantView FfnWeights::*which) {
  check(!experts.empty(), "a layer with experts");
  const QuantView& first = experts[0].*which;
  gpu::ExpertWeights all = {.first = gpu_weight(first), .weight_stride = 0, .scale_stride = 0};
  if (experts.size() == 1) return all;
  const auto data = [&](size_t e) { return (experts[e].*which).q.row_data(0); };
  const auto scale = [&](size_t e) { return static_cast<float*>((experts[e].*which).scale.data); };
  all.weight_stride = data(1) - data(0);
  if (!first.scale.empty()) all.scale_stride = scale(1) - scale(0);
  for (size_t e = 0; e < experts.size(); ++e) {
    const auto at = static_cast<int64_t>(e);
    check(data(e) == data(0) + at * all.weight_stride &&
              (first.scale.empty() || scale(e) == scale(0) + at * all.scale_stride) &&
              (experts[e].*which).q.dtype == first.q.dtype,
          "experts are equally spaced in memory");
  }
  return all;
}

std::vector<FfnWeights> on_gpu(const std::vector<FfnWeights>& experts) {
  std::vector<FfnWeights> here;
  for (const FfnWeights& e : experts)
    if (!e.gate.empty()) here.push_back(e);
  return here;
}

}  // namespace

CudaExperts::CudaExperts(const ModelConfig& config, const ModelWeights& weights,
                         CudaExpertRows& rows, gpu::Stream& stream)
    : c_(config), stream_(stream), rows_(rows), layers_(weights.layers.size()) {
  check(weights.slices.size() <= 1, "a GPU has one slice of its experts");
  for (size_t l = 0; l < layers_.size(); ++l) {
    const std::vector<FfnWeights> experts = on_gpu(weights.layers[l].experts);
    if (experts.empty()) continue;
    layers_[l] = {all_of(experts, &FfnWeights::gate), all_of(experts, &FfnWeights::up),
                  all_of(experts, &FfnWeights::down), static_cast<int>(experts.size())};
  }
}

std::vector<std::vector<int32_t>> CudaExperts::places(
    const ModelConfig& config, const ModelWeights& weights,
    const std::vector<std::vector<bool>>& on_other_ranks) {
  std::vector<std::vector<int32_t>> places(weights.layers.size());
  for (size_t l = 0; l < places.size(); ++l) {
    if (!config.is_moe(static_cast<int>(l))) continue;
    int32_t n = 0;
    for (const FfnWeights& e : weights.layers[l].experts) {
      const bool elsewhere = !on_other_ranks.empty() && on_other_ranks[l][places[l].size()];
      places[l].push_back(!e.gate.empty() ? n++
                          : elsewhere     ? ExpertPlaces::kOnOtherRank
                                          : ExpertPlaces::kOnCpu);
    }
  }
  return places;
}

Ticket CudaExperts::start(const ExpertBatch& batch) {
  const Ticket ticket = batch.micro_batch;
  Started& started = started_[ticket];
  started.batch = batch;
  const Layer& layer = layers_[batch.layer];
  if (layer.n_experts > 0 && for_tensor_cores(layer)) {
    started.rows = rows_.sort(batch, layer.n_experts, layer.gate.first);
    rows_.gate_up(started.rows, layer.gate, layer.up, {0, layer.n_experts});
  }
  return ticket;
}

void CudaExperts::add_to(Ticket ticket, TensorView y) {
  const Started& started = started_[ticket];
  const Layer& layer = layers_[started.batch.layer];
  if (layer.n_experts == 0) return;
  if (!for_tensor_cores(layer)) return add_plainly(started.batch, y);
  rows_.down(started.rows, layer.down, {0, layer.n_experts});
  rows_.add_to(started.rows, y);
}

bool CudaExperts::rounds_to_bf16() const {
  return std::all_of(layers_.begin(), layers_.end(), [](const Layer& layer) {
    return layer.n_experts == 0 || for_tensor_cores(layer);
  });
}

bool CudaExperts::for_tensor_cores(const Layer& layer) {
  return tandem::for_tensor_cores(layer.gate.first, kBlockCols) &&
         tandem::for_tensor_cores(layer.down.first, kBlockCols);
}

// Computes experts that tensor cores do not support: float weights, scales of other blocks.
void CudaExperts::add_plainly(const ExpertBatch& batch, TensorView y) {
  const Layer& layer = layers_[batch.layer];
  const TensorView& ids = batch.routing.ids;
  const auto plain = [](const gpu::ExpertWeights& w) {
    return gpu::PlainExpertWeights{w.first, w.weight_stride, w.scale_stride};
  };
  gpu::plain_experts(stream_, {.x = gpu_matrix(batch.x),
                               .gate = plain(layer.gate),
                               .up = plain(layer.up),
                               .down = plain(layer.down),
                               .ids = static_cast<const int32_t*>(ids.data),
                               .ids_stride = ids.stride,
                               .weights = gpu_matrix(batch.routing.weights),
                               .hidden = {rows_.hidden(batch.first_row), c_.expert_dim},
                               .y = gpu_matrix(y),
                               .tokens = static_cast<int>(y.rows),
                               .n_active = static_cast<int>(ids.cols)});
}

}  // namespace tandem
