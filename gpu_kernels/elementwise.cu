// Element-wise kernels. blockIdx.x indexes columns, blockIdx.y rows.
#include "device.h"
#include "gpu_kernels/kernels.h"
#include "gpu_kernels/products/pointwise.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 4;  // columns per thread, so that several loads are in flight

struct Column {
  int first, row;
};

__device__ Column column_of_thread() {
  return {static_cast<int>(blockIdx.x * kThreads * kEach + threadIdx.x),
          static_cast<int>(blockIdx.y)};
}

// Calls work(row, column) for this thread's columns, in rows blockIdx.y, blockIdx.y + gridDim.y, ..
template <class Work>
__device__ void for_columns(int rows, int cols, Work work) {
  const Column at = column_of_thread();
  for (int row = at.row; row < rows; row += gridDim.y) {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
      if (at.first + i * kThreads < cols) work(row, at.first + i * kThreads);
  }
}

LaunchShape shape_for(int rows, int cols) {
  constexpr int kColumns = kThreads * kEach;
  return {.grid_x = (cols + kColumns - 1) / kColumns,
          .grid_y = min(rows, kMaxGridYz),
          .threads = kThreads};
}

__device__ float widened(float v) { return v; }
__device__ float widened(bf16 v) { return to_float(v); }
__device__ float widened(fp8_e4m3 v) { return to_float(v); }

template <class T>
__global__ void embed_kernel(const __grid_constant__ EmbedArgs a) {
  for_columns(a.rows, a.cols, [&](int row, int column) {
    const T* from = static_cast<const T*>(a.table) + a.tokens[row] * a.table_stride;
    a.out.data[row * a.out.stride + column] = widened(from[column]);
  });
}

__global__ void gather_kernel(const __grid_constant__ GatherArgs a) {
  for_columns(a.rows, a.cols, [&](int row, int column) {
    a.out.data[row * a.out.stride + column] = a.x.data[a.rows_of_x[row] * a.x.stride + column];
  });
}

__global__ void add_kernel(const __grid_constant__ ElementwiseArgs a) {
  for_columns(a.rows, a.cols, [&](int row, int column) {
    a.x.data[row * a.x.stride + column] += a.other.data[row * a.other.stride + column];
  });
}

__global__ void silu_mul_kernel(const __grid_constant__ ElementwiseArgs a) {
  for_columns(a.rows, a.cols, [&](int row, int column) {
    float& x = a.x.data[row * a.x.stride + column];
    x = gated(x, a.other.data[row * a.other.stride + column]);
  });
}

__global__ void clear_kernel(const __grid_constant__ ElementwiseArgs a) {
  for_columns(a.rows, a.cols,
              [&](int row, int column) { a.x.data[row * a.x.stride + column] = 0; });
}

__global__ void append_kernel(const __grid_constant__ AppendArgs a) {
  for_columns(a.tokens, a.cols, [&](int token, int column) {
    a.cache[int64_t{a.rows_of_cache[token]} * a.cache_stride + column] =
        to_bf16(a.kv.data[token * a.kv.stride + column]);
  });
}

// A thread rotates one pair.
__global__ void rope_kernel(const __grid_constant__ RopeArgs a) {
  for_columns(a.tokens, a.rows_per_token * a.n_pairs, [&](int token, int i) {
    const int pair = i % a.n_pairs;
    const int64_t row = int64_t{token} * a.rows_per_token + i / a.n_pairs;
    float* p = a.x.data + row * a.x.stride + 2 * pair;
    const float2 v = rotated(p[0], p[1], a.positions[token], a.frequencies[pair], a.amplitude);
    p[0] = v.x;
    p[1] = v.y;
  });
}

}  // namespace

void embed(const Stream& stream, const EmbedArgs& a) {
  if (a.rows == 0) return;
  const auto kernel = a.type == Number::kF32    ? embed_kernel<float>
                      : a.type == Number::kBF16 ? embed_kernel<bf16>
                                                : embed_kernel<fp8_e4m3>;
  launch(kernel, shape_for(a.rows, a.cols), stream, a);
}

void gather_rows(const Stream& stream, const GatherArgs& a) {
  if (a.rows > 0) launch(gather_kernel, shape_for(a.rows, a.cols), stream, a);
}

void add(const Stream& stream, const ElementwiseArgs& a) {
  if (a.rows > 0) launch(add_kernel, shape_for(a.rows, a.cols), stream, a);
}

void silu_mul(const Stream& stream, const ElementwiseArgs& a) {
  if (a.rows > 0) launch(silu_mul_kernel, shape_for(a.rows, a.cols), stream, a);
}

void clear(const Stream& stream, const ElementwiseArgs& a) {
  if (a.rows > 0) launch(clear_kernel, shape_for(a.rows, a.cols), stream, a);
}

void append_kv(const Stream& stream, const AppendArgs& a) {
  if (a.tokens > 0) launch(append_kernel, shape_for(a.tokens, a.cols), stream, a);
}

void rope(const Stream& stream, const RopeArgs& a) {
  if (a.tokens > 0)
    launch(rope_kernel, shape_for(a.tokens, a.rows_per_token * a.n_pairs), stream, a);
}

}  // namespace tandem::gpu
