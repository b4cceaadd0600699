// What the KV cache stores of a token in each layer: planes, which are matrices with one row per
// token. The cache, its pages, their copies and the planner's sums all follow this description.
#pragma once
#include <array>

#include "core/tensor.h"
#include "model/config.h"

namespace tandem {

constexpr int kPageSize = 64;  // tokens in a page of the cache

// Bytes per token and layer of the FP8 KV cache, which exists on GPUs only. Its layout is in
// gpu_kernels/attention/attention.h.
constexpr int kFp8TokenBytes = 656;
// Whether a token's latent and rotary key fit into kFp8TokenBytes; true for all DeepSeek models.
bool takes_fp8_cache(const MlaConfig& mla);

struct KvPlane {
  const char* name = "";
  DType dtype = DType::kBF16;
  int64_t cols = 0;    // values per token
  int64_t stride = 0;  // values from one row to the next; rows begin at multiples of 16 bytes
  int64_t row_bytes() const { return stride * bits_of(dtype) / 8; }
};

// The planes of one layer.
class KvPlanes {
 public:
  static constexpr int kMaxPlanes = 4;
  KvPlanes() = default;
  KvPlanes(std::initializer_list<KvPlane> planes);
  const KvPlane* begin() const { return planes_.data(); }
  const KvPlane* end() const { return planes_.data() + n_; }
  int64_t token_bytes() const;

 private:
  std::array<KvPlane, kMaxPlanes> planes_;
  int n_ = 0;
};

// One plane, [kv_rank latent | rope_dim key]. `type` is kBF16, kF32 (with the reference kernels) or
// kF8E4M3, whose rows only a GPU's kernels can read.
KvPlanes kv_planes(const ModelConfig& config, int layer, DType type);

// Bytes per token in layers [first, last], and in all layers of the main model.
int64_t kv_bytes_per_token(const ModelConfig& config, DType type, int first, int last);
int64_t kv_bytes_per_token(const ModelConfig& config, DType type = DType::kBF16);

// What other attention with the same heads would store, in BF16: keys and values of nope_dim and
// v_dim for all heads, for groups of heads, or for one head; and this model's own keys and values,
// restored from the latents.
struct KvAlternatives {
  static constexpr int kGroups = 8;  // as in most models with grouped-query attention
  int groups;                        // at most as many as heads
  int64_t multi_head, grouped_query, multi_query, restored;  // bytes per token, all layers
};
KvAlternatives kv_alternatives(const ModelConfig& config);

}  // namespace tandem
