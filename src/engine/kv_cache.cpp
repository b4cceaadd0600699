#include "engine/kv_cache.h"

#include "model/parameters.h"

namespace tandem {
namespace {

// Rows begin at multiples of 16 bytes, as kernels on a GPU load them.
int64_t row_stride(const ModelConfig& config, DType dtype) {
  return dtype == DType::kF8E4M3 ? kFp8TokenBytes : (config.mla.cache_dim() + 7) / 8 * 8;
}

}  // namespace

int64_t KvCache::bytes_for(const ModelConfig& config, int64_t n_tokens, DType dtype) {
  const int64_t rows = int64_t{pages_for(n_tokens)} * kPageSize;
  return config.n_layers * Arena::padded_bytes(rows * row_stride(config, dtype) * size_of(dtype));
}

KvCache::KvCache(const ModelConfig& config, int64_t n_tokens, DType dtype, Buffer memory)
    : arena_(std::move(memory)), n_pages_(pages_for(n_tokens)) {
  for (int l = 0; l < config.n_layers; ++l)
    layers_.push_back(arena_.matrix(int64_t{n_pages_} * kPageSize, row_stride(config, dtype), dtype)
                          .cols_from(0, config.mla.cache_dim()));
}

std::span<std::byte> KvCache::page(int layer, int32_t page) const {
  const TensorView rows = layers_[layer].rows_from(int64_t{page} * kPageSize, kPageSize);
  return {rows.row_data(0), static_cast<size_t>(rows.rows * rows.row_bytes())};
}

}  // namespace tandem
