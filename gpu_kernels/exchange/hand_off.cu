// One block per token. Each thread writes 8 numbers at a time, so that a warp's stores cross the
// link as full packets.
#include "device.h"
#include "gpu_kernels/exchange/hand_off.h"
#include "gpu_kernels/exchange/signal_steps.h"
#include "gpu_kernels/reduce.h"
#include "packed.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 256, kEach = 8;
constexpr int32_t kNowhere = -2;  // the place of an expert that does not exist

struct Shared {
  float max[kThreads / 32];
};

__device__ void hand_down_pairs(const HandDownArgs& a, int64_t token) {
  for (int i = threadIdx.x; i < a.n_active; i += kThreads) {
    const int32_t id = a.ids[token * a.ids_stride + i];
    const int32_t place = id < 0 ? kNowhere : a.gpu_place ? a.gpu_place[id] : -1;
    a.to.ids[token * a.n_active + i] = place == -1 ? id : -1;
    a.to.weights[token * a.n_active + i] = a.weights.data[token * a.weights.stride + i];
    if (a.gpu_ids) a.gpu_ids[token * a.n_active + i] = place;
  }
}

__device__ float largest_of_row(const float* x, int dim, Shared& s) {
  float max = 0;
  for (int c = threadIdx.x; c < dim; c += kThreads) max = fmaxf(max, fabsf(x[c]));
  max = warp_max(max);
  if (threadIdx.x % 32 == 0) s.max[threadIdx.x / 32] = max;
  __syncthreads();
  for (int warp = 0; warp < kThreads / 32; ++warp) max = fmaxf(max, s.max[warp]);
  return max;
}

__device__ uint32_t pack_codes(const float* v, float inverse) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i)
    word |= static_cast<uint32_t>(128 + static_cast<int>(rintf(v[i] * inverse))) << 8 * i;
  return word;
}

__global__ void __launch_bounds__(kThreads)
    hand_down_kernel(const __grid_constant__ HandDownArgs a) {
  begin_early();
  const int64_t token = blockIdx.x;
  const float* x = a.x.data + token * a.x.stride;
  hand_down_pairs(a, token);
  float inverse = 0;
  if (a.type == RowType::kU8) {
    const float scale = largest_of_row(x, a.dim, shared_memory<Shared>()) / 127;
    inverse = scale > 0 ? 1 / scale : 0;
    if (threadIdx.x == 0) a.to.scales[token] = scale;
  }
  uint8_t* const row = static_cast<uint8_t*>(a.to.rows) + token * a.to.row_bytes;
  const int columns = static_cast<int>(a.to.row_bytes / bytes_of(a.type));
  for (int first = threadIdx.x * kEach; first < columns; first += kThreads * kEach) {
    float v[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) v[i] = first + i < a.dim ? x[first + i] : 0;
    uint8_t* const to = row + first * bytes_of(a.type);
    if (a.type == RowType::kF32) {
      reinterpret_cast<float4*>(to)[0] = make_float4(v[0], v[1], v[2], v[3]);
      reinterpret_cast<float4*>(to)[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else if (a.type == RowType::kBF16) {
      *reinterpret_cast<uint4*>(to) = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                                       pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
    } else {
      *reinterpret_cast<uint2*>(to) = {pack_codes(v, inverse), pack_codes(v + 4, inverse)};
    }
  }
  if (!a.handed_down.word) return;
  __syncthreads();
  if (threadIdx.x == 0 && ends_last(a.handed_down, gridDim.x)) raise(a.handed_down);
}

// All reads over the link are in flight at once.
__global__ void __launch_bounds__(kThreads, 2)
    add_awaited_kernel(const __grid_constant__ AddAwaitedArgs a) {
  begin_early();
  if (threadIdx.x == 0) await_raise(a.sum_is_there);
  __syncthreads();
  const int first = blockIdx.x * kThreads * kEach + threadIdx.x;
  float* const y = a.y.data + blockIdx.y * a.y.stride + first;
  const float* const sum = a.sum.data + blockIdx.y * a.sum.stride + first;
  float v[kEach] = {};
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (first + i * kThreads < a.cols) v[i] = sum[i * kThreads];
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (first + i * kThreads < a.cols) y[i * kThreads] += v[i];
  __syncthreads();
  if (threadIdx.x == 0 && ends_last(a.sum_is_there, gridDim.x * gridDim.y))
    count_await(a.sum_is_there);
}

__global__ void __launch_bounds__(kThreads) place_kernel(const __grid_constant__ PlaceArgs a) {
  const int pair = blockIdx.x * kThreads + threadIdx.x;
  if (pair >= a.tokens * a.n_active) return;
  const int32_t id = a.ids[pair / a.n_active * a.ids_stride + pair % a.n_active];
  a.out[pair] = id < 0 ? kNowhere : a.place[id];
}

}  // namespace

void place_experts(const Stream& stream, const PlaceArgs& a) {
  if (a.tokens == 0) return;
  launch(place_kernel,
         {.grid_x = (a.tokens * a.n_active + kThreads - 1) / kThreads, .threads = kThreads}, stream,
         a);
}

void add_awaited(const Stream& stream, const AddAwaitedArgs& a) {
  constexpr int kColumns = kThreads * kEach;
  if (a.rows > 0)
    launch(add_awaited_kernel,
           {.grid_x = (a.cols + kColumns - 1) / kColumns,
            .grid_y = a.rows,
            .threads = kThreads,
            .early = true},
           stream, a);
}

void hand_down(const Stream& stream, const HandDownArgs& a) {
  if (a.tokens == 0) return;
  launch(hand_down_kernel,
         {.grid_x = a.tokens, .threads = kThreads, .shared_bytes = sizeof(Shared), .early = true},
         stream, a);
}

}  // namespace tandem::gpu
