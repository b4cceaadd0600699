// A kernel that represents all kernels of the program.
#pragma once

namespace tandem::gpu {

const void* any_kernel();

}  // namespace tandem::gpu
