#include "offload/gpu/cuda_routing_recorder.h"

#include <algorithm>

namespace tandem {

CudaRoutingRecorder::CudaRoutingRecorder(const ModelConfig& config, int max_tokens,
                                         gpu::Stream& stream)
    : c_(config),
      stream_(stream),
      max_tokens_(max_tokens),
      ids_(int64_t{config.n_all_layers()} * max_tokens * config.router.n_active *
               int64_t{sizeof(int32_t)},
           gpu::Site::kMapped),
      counter_(config) {}

void CudaRoutingRecorder::submitted(const ExpertBatch& batch) {
  const TensorView& ids = batch.routing.ids;
  if (ids.rows == 0) return;
  check(ids.stride == ids.cols && ids.cols == c_.router.n_active, "a step's choices are dense");
  stream_.copy(ids.data, ids.rows * ids.row_bytes(),
               ids_of(batch.layer, batch.first_row, ids.rows).data);
}

void CudaRoutingRecorder::step_ended(LayerRange layers, int n_tokens) {
  stream_.wait();
  for (int layer = layers.first; layer < std::min(layers.end, c_.n_layers); ++layer)
    if (c_.is_moe(layer)) counter_.add(layer, ids_of(layer, 0, n_tokens));
}

TensorView CudaRoutingRecorder::ids_of(int layer, int64_t first_row, int64_t n_tokens) const {
  const int n_active = c_.router.n_active;
  return {ids_.as<int32_t>() + (int64_t{layer} * max_tokens_ + first_row) * n_active, n_tokens,
          n_active, n_active, DType::kI32};
}

}  // namespace tandem
