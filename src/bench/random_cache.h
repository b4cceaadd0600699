// A KV cache as after a long prompt, without computing one.
#pragma once
#include "engine/kv_cache.h"

namespace tandem {

// Numbers between -1 and 1 in every page.
void fill_with_random(const KvCache& cache, const ModelConfig& config);

}  // namespace tandem
