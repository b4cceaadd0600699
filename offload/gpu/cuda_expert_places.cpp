#include "offload/gpu/cuda_expert_places.h"

#include "gpu_kernels/exchange/hand_off.h"
#include "ops/cuda_weights.h"

namespace tandem {
namespace {

constexpr int64_t kWord = sizeof(int32_t);

}  // namespace

ExpertPlaces::ExpertPlaces(const ModelConfig& config, std::span<const std::vector<int32_t>> places,
                           int max_tokens, gpu::Stream& stream)
    : c_(config), stream_(stream) {
  std::vector<int32_t> all;
  for (size_t l = 0; l < places.size(); ++l) {
    all.insert(all.end(), places[l].begin(), places[l].end());
    all.resize((l + 1) * config.router.n_experts, kOnCpu);
  }
  places_ = gpu::Buffer(std::ssize(all) * kWord, gpu::Site::kDevice);
  stream_.copy(all.data(), places_.bytes(), places_.as<int32_t>());
  stream_.wait();
  ids_ = gpu::Buffer(int64_t{max_tokens} * config.router.n_active * kWord, gpu::Site::kDevice);
}

int64_t ExpertPlaces::bytes_for(const ModelConfig& c, int max_tokens) {
  return (int64_t{c.n_all_layers()} * c.router.n_experts +
          int64_t{max_tokens} * c.router.n_active) *
         kWord;
}

void ExpertPlaces::set(int layer, std::span<const int32_t> places) {
  check(std::ssize(places) == c_.router.n_experts, "a place for each expert of the layer");
  stream_.copy(places.data(), std::ssize(places) * kWord,
               places_.as<int32_t>() + int64_t{layer} * c_.router.n_experts);
  stream_.wait();
}

const int32_t* ExpertPlaces::of_layer(int layer) const {
  return places_.as<int32_t>() + int64_t{layer} * c_.router.n_experts;
}

TensorView ExpertPlaces::ids(StepRows rows) const {
  const int n_active = c_.router.n_active;
  return {ids_.as<int32_t>() + int64_t{rows.first} * n_active, rows.n, n_active, n_active,
          DType::kI32};
}

TensorView ExpertPlaces::placed(const ExpertBatch& batch) {
  const TensorView &chosen = batch.routing.ids, out = ids(rows_of(batch));
  gpu::place_experts(stream_, {.ids = static_cast<const int32_t*>(chosen.data),
                               .ids_stride = chosen.stride,
                               .place = of_layer(batch.layer),
                               .out = out.row<int32_t>(0),
                               .tokens = static_cast<int>(chosen.rows),
                               .n_active = static_cast<int>(chosen.cols)});
  return out;
}

}  // namespace tandem
