// A KV cache as after a long prompt, without computing one.
#pragma once
#include "cpu_kernels/kernels.h"
#include "engine/kv_cache.h"

namespace tandem {

// BF16, or float with the reference kernels, as `tandem run` has it.
DType cache_type_for(const cpu::KernelTable& kernels);

// Numbers between -1 and 1 in every page.
void fill_with_random(const KvCache& cache, const ModelConfig& config);

}  // namespace tandem
