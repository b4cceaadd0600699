// per_head_product() where heads multiply rows of their own: skinny_product() once for each head.
#pragma once
#include "gpu_kernels/products.h"

namespace tandem::gpu {

void skinny_per_head(const Stream& stream, const PerHeadArgs& args);

}  // namespace tandem::gpu
