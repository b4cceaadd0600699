#include "offload/cuda_routing_recorder.h"

namespace tandem {

CudaRoutingRecorder::CudaRoutingRecorder(const ModelConfig& config, RoutedExperts& experts,
                                         int max_tokens, gpu::Stream& stream)
    : c_(config),
      experts_(experts),
      stream_(stream),
      max_tokens_(max_tokens),
      ids_(
          int64_t{config.n_layers} * max_tokens * config.router.n_active * int64_t{sizeof(int32_t)},
          gpu::Site::kMapped),
      counts_(config) {}

void CudaRoutingRecorder::submit(const ExpertBatch& batch) {
  const TensorView& ids = batch.routing.ids;
  check(ids.stride == ids.cols && ids.cols == c_.router.n_active, "a step's choices are dense");
  layer_ = batch.layer;
  stream_.copy(ids.data, ids.rows * ids.row_bytes(), ids_of(layer_, ids.rows).data);
  experts_.submit(batch);
}

void CudaRoutingRecorder::add_to(TensorView y) {
  experts_.add_to(y);
  if (layer_ + 1 == c_.n_layers && !stream_.is_recording()) count(y.rows);
}

void CudaRoutingRecorder::follow(int n_tokens) {
  experts_.follow(n_tokens);
  count(n_tokens);
}

TensorView CudaRoutingRecorder::ids_of(int layer, int64_t n_tokens) const {
  const int n_active = c_.router.n_active;
  return {ids_.as<int32_t>() + int64_t{layer} * max_tokens_ * n_active, n_tokens, n_active,
          n_active, DType::kI32};
}

// The last layer is on its way: the step ends here.
void CudaRoutingRecorder::count(int64_t n_tokens) {
  stream_.wait();
  for (int layer = 0; layer < c_.n_layers; ++layer)
    if (c_.is_moe(layer)) count_choices(ids_of(layer, n_tokens), counts_.of_layer[layer]);
}

}  // namespace tandem
