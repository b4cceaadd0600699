#include "scheduling/kv_cache.h"

namespace tandem {

KvCache::Layers KvCache::planes_of(const ModelConfig& config, DType type, StageLayers stage) {
  Layers layers;
  for (int l = 0; l < config.n_all_layers(); ++l)
    layers.push_back(has_layer(stage, l) ? kv_planes(config, l, type) : KvPlanes());
  return layers;
}

int64_t KvCache::bytes_for(const Layers& layers, int64_t n_tokens) {
  const int64_t rows = int64_t{pages_for(n_tokens)} * kPageSize;
  int64_t bytes = 0;
  for (const KvPlanes& planes : layers)
    for (const KvPlane& plane : planes) bytes += Arena::padded_bytes(rows * plane.row_bytes());
  return bytes;
}

KvCache::KvCache(const Layers& layers, int64_t n_tokens, Buffer memory)
    : arena_(std::move(memory)), n_pages_(pages_for(n_tokens)) {
  for (const KvPlanes& planes : layers) {
    std::vector<TensorView>& views = layers_.emplace_back();
    for (const KvPlane& plane : planes) {
      const int64_t rows = int64_t{n_pages_} * kPageSize;
      views.push_back(arena_.matrix(rows, plane.stride, plane.dtype).cols_from(0, plane.cols));
    }
    page_bytes_ += kPageSize * planes.token_bytes();
  }
}

}  // namespace tandem
