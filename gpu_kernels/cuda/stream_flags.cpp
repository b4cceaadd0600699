// Implements stream_flags.h with cuStreamBatchMemOp() of CUDA 11.7 and newer, which needs no kernel
// module parameter. Uses the driver library that the runtime has opened.
#include "gpu_kernels/stream_flags.h"

#include <cuda.h>
#include <dlfcn.h>

#include <span>

#include "core/run_error.h"

namespace tandem::gpu {
namespace {

using Operations = CUresult (*)(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned);

Operations found_operations() {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return driver ? reinterpret_cast<Operations>(dlsym(driver, "cuStreamBatchMemOp_v2")) : nullptr;
}
Operations operations() {
  static const Operations found = found_operations();
  return found;
}

// The GPU addresses mapped memory by the host's address.
CUdeviceptr address(const uint32_t* word) { return reinterpret_cast<CUdeviceptr>(word); }

CUstreamBatchMemOpParams writing(const uint32_t* word, uint32_t value) {
  CUstreamBatchMemOpParams op = {};
  op.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  op.writeValue.address = address(word);
  op.writeValue.value = value;
  op.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;  // includes a memory barrier
  return op;
}

CUstreamBatchMemOpParams waiting(const uint32_t* word, uint32_t value) {
  CUstreamBatchMemOpParams op = {};
  op.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  op.waitValue.address = address(word);
  op.waitValue.value = value;
  op.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
  return op;
}

void enqueue(const Stream& stream, std::span<CUstreamBatchMemOpParams> ops) {
  const CUresult status = operations()(static_cast<CUstream>(stream.handle()),
                                       static_cast<unsigned>(ops.size()), ops.data(), 0);
  require_run(status == CUDA_SUCCESS, "cuStreamBatchMemOp: status {}", static_cast<int>(status));
}

}  // namespace

std::string why_no_stream_flags() {
  return operations() ? "" : "the driver has no cuStreamBatchMemOp_v2";
}

void raise_flag(const Stream& stream, uint32_t* word) {
  CUstreamBatchMemOpParams ops[] = {writing(word, 1)};
  enqueue(stream, ops);
}

void take_flag(const Stream& stream, uint32_t* word) {
  CUstreamBatchMemOpParams ops[] = {waiting(word, 1), writing(word, 0)};
  enqueue(stream, ops);
}

}  // namespace tandem::gpu
