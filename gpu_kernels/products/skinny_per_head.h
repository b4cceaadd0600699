// per_head_product() for heads that multiply their own rows: skinny_product() for each head.
#pragma once
#include "gpu_kernels/products/products.h"

namespace tandem::gpu {

void skinny_per_head(const Stream& stream, const PerHeadArgs& args);

}  // namespace tandem::gpu
