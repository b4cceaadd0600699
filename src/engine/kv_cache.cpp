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
    : arena_(std::move(memory)) {
  const int n_pages = pages_for(n_tokens);
  for (int l = 0; l < config.n_layers; ++l)
    layers_.push_back(arena_.matrix(int64_t{n_pages} * kPageSize, row_stride(config, dtype), dtype)
                          .cols_from(0, config.mla.cache_dim()));
  free_.reserve(n_pages);
  for (int page = n_pages - 1; page >= 0; --page) free_.push_back(page);
}

std::span<std::byte> KvCache::page(int layer, int32_t page) const {
  const TensorView rows = layers_[layer].rows_from(int64_t{page} * kPageSize, kPageSize);
  return {rows.row_data(0), static_cast<size_t>(rows.rows * rows.row_bytes())};
}

int32_t KvCache::take_page() {
  check(!free_.empty(), "a page is taken only when one is free");
  const int32_t page = free_.back();
  free_.pop_back();
  return page;
}

void KvCache::give_back(std::vector<int32_t>& pages) {
  free_.insert(free_.end(), pages.begin(), pages.end());
  pages.clear();
}

}  // namespace tandem
