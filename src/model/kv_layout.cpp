#include "model/kv_layout.h"

#include <algorithm>

#include "core/rounding.h"

namespace tandem {

bool takes_fp8_cache(const MlaConfig& mla) { return mla.kv_rank <= 512 && mla.rope_dim <= 64; }

KvPlanes::KvPlanes(std::initializer_list<KvPlane> planes) : n_(static_cast<int>(planes.size())) {
  check(n_ <= kMaxPlanes, "planes of a layer");
  std::copy(planes.begin(), planes.end(), planes_.begin());
}

int64_t KvPlanes::token_bytes() const {
  int64_t bytes = 0;
  for (const KvPlane& plane : *this) bytes += plane.row_bytes();
  return bytes;
}

KvPlanes kv_planes(const ModelConfig& config, int /*layer*/, DType type) {
  constexpr int64_t kAligned = 8;  // values of two bytes that have 16
  const int64_t cols = config.mla.cache_dim();
  const int64_t stride = round_up(cols, kAligned);
  return {{"latent", type, cols, type == DType::kF8E4M3 ? kFp8TokenBytes : stride}};
}

int64_t kv_bytes_per_token(const ModelConfig& config, DType type, int first, int last) {
  int64_t bytes = 0;
  for (int layer = first; layer <= last; ++layer)
    bytes += kv_planes(config, layer, type).token_bytes();
  return bytes;
}

int64_t kv_bytes_per_token(const ModelConfig& config, DType type) {
  return kv_bytes_per_token(config, type, 0, config.n_layers - 1);
}

KvAlternatives kv_alternatives(const ModelConfig& config) {
  const MlaConfig& mla = config.mla;
  const int groups = std::min(KvAlternatives::kGroups, mla.n_heads);
  const int64_t value_bytes = int64_t{config.n_layers} * bits_of(DType::kBF16) / 8;
  const int64_t head = mla.nope_dim + mla.v_dim;
  return {.groups = groups,
          .multi_head = mla.n_heads * head * value_bytes,
          .grouped_query = groups * head * value_bytes,
          .multi_query = head * value_bytes,
          .restored = mla.n_heads * (head + mla.rope_dim) * value_bytes};
}

}  // namespace tandem
