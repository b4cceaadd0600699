// Paged latent cache: one matrix a layer, [n_pages * page_size, kv_rank + rope_dim]. Who has which
// page is PagePool's to say.
#pragma once
#include <vector>

#include "core/memory.h"
#include "model/config.h"
#include "ops/ops.h"

namespace tandem {

constexpr int pages_for(int64_t tokens) {
  return static_cast<int>((tokens + kPageSize - 1) / kPageSize);
}

class KvCache {
 public:
  // Room for n_tokens tokens, rounded up to pages. dtype: kBF16, kF32 for the reference, or
  // kF8E4M3, whose rows are kFp8TokenBytes and no matrix for anybody but a GPU's kernels.
  KvCache(const ModelConfig& config, int64_t n_tokens, DType dtype)
      : KvCache(config, n_tokens, dtype, Buffer(bytes_for(config, n_tokens, dtype))) {}
  // The same in memory of bytes_for() bytes, as of a GPU.
  KvCache(const ModelConfig& config, int64_t n_tokens, DType dtype, Buffer memory);
  static int64_t bytes_for(const ModelConfig& config, int64_t n_tokens, DType dtype);

  TensorView layer(int l) const { return layers_[l]; }
  int n_layers() const { return static_cast<int>(layers_.size()); }
  // The bytes of a page in a layer, of the same number in all.
  std::span<std::byte> page(int layer, int32_t page) const;
  int n_pages() const { return n_pages_; }

 private:
  Arena arena_;
  std::vector<TensorView> layers_;
  int n_pages_;
};

}  // namespace tandem
