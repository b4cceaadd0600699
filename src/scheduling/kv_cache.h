// Paged KV cache: each plane of a layer is a matrix [n_pages * page_size, ..] (model/kv_layout.h).
// PagePool decides which sequence uses which page.
#pragma once
#include <span>
#include <vector>

#include "core/memory.h"
#include "core/rounding.h"
#include "model/backbone_share.h"
#include "model/kv_layout.h"

namespace tandem {

constexpr int pages_for(int64_t tokens) { return static_cast<int>(ceil_div(tokens, kPageSize)); }

class KvCache {
 public:
  // Capacity n_tokens, rounded up to whole pages; `type` as for kv_planes().
  KvCache(const ModelConfig& config, int64_t n_tokens, DType type)
      : KvCache(config, n_tokens, type, Buffer(bytes_for(config, n_tokens, type))) {}
  // In `memory` of bytes_for() bytes, which may be a GPU's. Layers of other stages have no
  // planes.
  KvCache(const ModelConfig& config, int64_t n_tokens, DType type, Buffer memory,
          StageLayers stage = kAllLayers)
      : KvCache(planes_of(config, type, stage), n_tokens, std::move(memory)) {}
  static int64_t bytes_for(const ModelConfig& config, int64_t n_tokens, DType type,
                           StageLayers stage = kAllLayers) {
    return bytes_for(planes_of(config, type, stage), n_tokens);
  }

  // The same for any planes, [layers].
  using Layers = std::vector<KvPlanes>;
  KvCache(const Layers& layers, int64_t n_tokens, Buffer memory);
  static int64_t bytes_for(const Layers& layers, int64_t n_tokens);

  TensorView plane(int layer, int plane) const { return layers_[layer][plane]; }
  TensorView layer(int layer) const { return plane(layer, 0); }  // for models with one plane
  int n_layers() const { return static_cast<int>(layers_.size()); }
  int n_pages() const { return n_pages_; }
  int64_t page_bytes() const { return page_bytes_; }  // bytes of a page in all planes of all layers

  // Calls visit(bytes) for a page's part of each plane of each layer, always in the same order and
  // with the same sizes.
  template <class Visit>
  void for_each_piece(int32_t page, Visit visit) const {
    for_each_piece(page, n_layers(), visit);
  }
  // The same in the first n_layers layers.
  template <class Visit>
  void for_each_piece(int32_t page, int n_layers, Visit visit) const {
    for (int layer = 0; layer < n_layers; ++layer)
      for (const TensorView& plane : layers_[layer]) visit(piece(plane, page));
  }

  // Calls visit(from, to) for the same parts of two pages.
  template <class Visit>
  void for_each_pair(int32_t from, int32_t to, Visit visit) const {
    for (const std::vector<TensorView>& planes : layers_)
      for (const TensorView& plane : planes) visit(piece(plane, from), piece(plane, to));
  }

 private:
  static std::span<std::byte> piece(const TensorView& plane, int32_t page) {
    const TensorView rows = plane.rows_from(int64_t{page} * kPageSize, kPageSize);
    return {rows.row_data(0), static_cast<size_t>(rows.rows * rows.row_bytes())};
  }
  static Layers planes_of(const ModelConfig& config, DType type, StageLayers stage);

  Arena arena_;
  std::vector<std::vector<TensorView>> layers_;  // [layers][planes]
  int n_pages_;
  int64_t page_bytes_ = 0;
};

}  // namespace tandem
