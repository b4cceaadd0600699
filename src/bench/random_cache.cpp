#include "bench/random_cache.h"

#include <bit>
#include <numeric>

#include "cpu_kernels/kernels.h"

namespace tandem {

std::vector<int32_t> random_tokens(int n, int vocab, std::mt19937& rng) {
  std::vector<int32_t> tokens(n);
  for (int32_t& t : tokens) t = std::uniform_int_distribution<int32_t>(0, vocab - 1)(rng);
  return tokens;
}

std::vector<int32_t> first_pages(int n) {
  std::vector<int32_t> pages(n);
  std::iota(pages.begin(), pages.end(), 0);
  return pages;
}

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
