// What kernel files use beyond CUDA C++: one thin function per PTX instruction, and launch().
// emulated/device.h offers the same names to g++; the include path selects one.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "gpu_kernels/launch_shape.h"
#include "gpu_kernels/numbers.h"

namespace tandem::gpu {

void launch_kernel(const void* kernel, const LaunchShape& shape, const Stream& stream,
                   const void* args);

// A kernel takes one plain struct by value.
template <class Args>
void launch(void (*kernel)(Args), const LaunchShape& shape, const Stream& stream,
            const std::type_identity_t<Args>& args) {
  launch_kernel(reinterpret_cast<const void*>(kernel), shape, stream, &args);
}

// See LaunchShape::early. Waits until all earlier kernels have ended and their writes are visible,
// then lets the next kernel start: after the wait, so that no more than one is ahead.
__device__ inline void begin_early() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The block's dynamic shared memory as one struct; launch with shared_bytes = sizeof(T).
template <class T>
__device__ T& shared_memory() {
  extern __shared__ __align__(128) unsigned char bytes[];
  return *reinterpret_cast<T*>(bytes);
}

__device__ inline float to_float(bf16 v) { return __uint_as_float(uint32_t{v.bits} << 16); }
__device__ inline bf16 to_bf16(float v) { return {__bfloat16_as_ushort(__float2bfloat16_rn(v))}; }
__device__ inline float to_float(fp8_e4m3 v) {
  __nv_fp8_e4m3 f;
  f.__x = v.bits;
  return static_cast<float>(f);
}

namespace detail {
__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
}  // namespace detail

// Starts a copy of 16 bytes from global to shared memory, both 16-byte aligned. If not `valid`,
// writes zeros and reads nothing.
__device__ inline void cp_async_16(void* to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(detail::shared_address(to)),
               "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's committed groups are unfinished.
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Loads four 8x8 bf16 matrices from shared memory; lane 8 i + r points at row r of matrix i. Of
// each matrix, lane l receives elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1).
__device__ inline void ldmatrix_x4(uint32_t (&out)[4], const bf16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(detail::shared_address(row))
               : "memory");
}
// Like ldmatrix_x4(), of the transposed matrices.
__device__ inline void ldmatrix_x4_trans(uint32_t (&out)[4], const bf16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(detail::shared_address(row))
               : "memory");
}

// c[16, 8] += a[16, 16] b[16, 8], fragments as in PTX ISA "mma.m16n8k16", f32 accumulation.
__device__ inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c[16, 8] += a[16, 32] b[32, 8] of FP8 (e4m3), fragments as in PTX ISA "mma.m16n8k32", f32
// accumulation with fewer bits than a float. Needs compute capability 8.9 (GpuInfo::fp8_mma); code
// compiled for older GPUs traps.
__device__ inline void mma_m16n8k32_e4m3(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
#if __CUDA_ARCH__ >= 890
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  __trap();
#endif
}

// Words shared with the CPU or between blocks. A polling loop must call load_acquire(), where the
// emulator switches to other threads.
__device__ inline uint32_t load_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline void store_release(uint32_t* p, uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ inline uint32_t add_acq_rel(uint32_t* p, uint32_t v) {  // returns the old value
  uint32_t old;
  asm volatile("atom.acq_rel.sys.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(v)
               : "memory");
  return old;
}

}  // namespace tandem::gpu
