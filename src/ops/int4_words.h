// INT4 as compressed-tensors stores it (pack-quantized, compressors/pack_quantized: pack_to_int32):
// little-endian 32-bit words of eight numbers, each plus 8, the first in the lowest bits. Converted
// without loss to the order of the kernels (cpu::WeightType::kI4), or to float.
#pragma once
#include <cstdint>

namespace tandem {

// n numbers, a multiple of 8; `words` and `codes` have n / 2 bytes at any address.
void int4_codes(const void* words, int64_t n, void* codes);
void int4_values(const void* words, int64_t n, float* values);
// Sum of n numbers in the order of the kernels.
int64_t int4_sum(const void* codes, int64_t n);

}  // namespace tandem
