#include "bench/random_cache.h"

#include <bit>
#include <random>

#include "cpu_kernels/kernels.h"

namespace tandem {

void fill_with_random(const KvCache& cache, const ModelConfig& config) {
  std::minstd_rand rng(1);
  for (int l = 0; l < config.n_layers; ++l) {
    const TensorView layer = cache.layer(l);
    for (int64_t r = 0; r < layer.rows; ++r)
      for (int64_t i = 0; i < layer.cols; ++i) {
        const float value = static_cast<float>(rng()) * 0x1p-30f - 1;
        if (layer.dtype == DType::kF32)
          layer.row<float>(r)[i] = value;
        else
          layer.row<cpu::bf16>(r)[i] = static_cast<cpu::bf16>(std::bit_cast<uint32_t>(value) >> 16);
      }
  }
}

}  // namespace tandem
