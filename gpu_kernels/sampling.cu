// One block draws the token of a row. Tokens are not sorted: a filter keeps those whose keys reach
// a threshold, which is determined byte by byte from sums over all keys with the same leading
// bytes.
#include "core/invariant.h"
#include "device.h"
#include "gpu_kernels/sampling.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32, kDigits = 256;

using Sum = unsigned long long;

struct Best {
  float value;
  int32_t token;  // kNotFinite invalidates the row
};

struct Shared {
  DrawRow how;
  Best best[kWarps];
  Sum of_warp[kWarps];
  Sum of_digit[kDigits];
  // Known leading bytes of the threshold; sum still to be reached by keys with this prefix.
  Sum prefix, wanted;
  bool found;
};

__device__ Best likeliest(const DrawArgs& a, const float* row, Shared& s);
__device__ void weigh(const DrawArgs& a, const DrawRow& how, float max, float* row);
template <class Measure>
__device__ Sum threshold(const float* weights, int vocab, Sum wanted, Measure measure, Shared& s);
template <class Measure>
__device__ Sum sum_of(const float* weights, int begin, int end, Measure measure, Shared& s);
template <class Measure>
__device__ int32_t draw_from(const float* weights, int vocab, double uniform, Measure measure,
                             Shared& s);

// More likely tokens have larger keys; of equally likely ones the lower token has.
__device__ Sum key_of(float weight, int token) {
  return Sum{__float_as_uint(weight)} << 32 | (0xffffffffu - static_cast<uint32_t>(token));
}
__device__ Sum whole(float weight) { return static_cast<Sum>(weight * 0x1p45f); }

__global__ void __launch_bounds__(kThreads) draw_kernel(const __grid_constant__ DrawArgs a) {
  Shared& s = shared_memory<Shared>();
  if (threadIdx.x == 0) s.how = a.how[blockIdx.x];
  __syncthreads();
  const DrawRow how = s.how;
  float* const row = a.logits.data + how.row * a.logits.stride;
  const Best best = likeliest(a, row, s);
  int32_t token = best.token;
  if (token != kNotFinite && how.temperature > 0) {
    weigh(a, how, best.value, row);
    __syncthreads();
    Sum least = 0;
    const auto weight_of_kept = [&](float w, int t) {
      return key_of(w, t) >= least && w >= how.min_p ? whole(w) : 0;
    };
    if (how.top_k > 0 && how.top_k < a.vocab)
      least = threshold(
          row, a.vocab, how.top_k, [](float, int) { return Sum{1}; }, s);
    if (how.top_p < 1) {
      const Sum of_top_k = least;
      const auto weight_of_top_k = [&](float w, int t) {
        return key_of(w, t) >= of_top_k ? whole(w) : 0;
      };
      const Sum all = sum_of(row, 0, a.vocab, weight_of_top_k, s);
      const auto wanted = static_cast<Sum>(ceil(double{how.top_p} * static_cast<double>(all)));
      least = max(least, threshold(row, a.vocab, wanted, weight_of_top_k, s));
    }
    token = draw_from(row, a.vocab, how.uniform, weight_of_kept, s);
  }
  if (threadIdx.x == 0) a.tokens[blockIdx.x] = token;
}

__device__ bool is_allowed(const DrawArgs& a, int token) {
  return a.allowed[token / 32] >> token % 32 & 1;
}

__device__ Best likelier(Best a, Best b) {
  if (a.token == kNotFinite || b.token == kNotFinite) return {0, kNotFinite};
  return a.value > b.value || (a.value == b.value && a.token < b.token) ? a : b;
}

__device__ Best likeliest(const DrawArgs& a, const float* row, Shared& s) {
  Best best = {-INFINITY, a.vocab};
  for (int t = threadIdx.x; t < a.vocab; t += kThreads) {
    const float v = row[t];
    if (!(fabsf(v) < INFINITY))
      best = {0, kNotFinite};
    else if (is_allowed(a, t))
      best = likelier(best, {v, t});
  }
  for (int d = 16; d > 0; d /= 2)
    best =
        likelier(best, {__shfl_xor_sync(~0u, best.value, d), __shfl_xor_sync(~0u, best.token, d)});
  if (threadIdx.x % 32 == 0) s.best[threadIdx.x / 32] = best;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) best = likelier(best, s.best[w]);
  return best;
}

__device__ void weigh(const DrawArgs& a, const DrawRow& how, float max, float* row) {
  for (int t = threadIdx.x; t < a.vocab; t += kThreads)
    row[t] = is_allowed(a, t) ? expf((row[t] - max) / how.temperature) : 0;
}

__device__ Sum warp_total(Sum v) {
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
  return v;
}

// The sum over tokens [begin, end), for every thread.
template <class Measure>
__device__ Sum sum_of(const float* weights, int begin, int end, Measure measure, Shared& s) {
  Sum sum = 0;
  for (int t = begin + threadIdx.x; t < end; t += kThreads) sum += measure(weights[t], t);
  sum = warp_total(sum);
  __syncthreads();  // other threads may still read the last sums
  if (threadIdx.x % 32 == 0) s.of_warp[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += s.of_warp[w];
  return sum;
}

// Called by one warp: finds the digit at which sums, from the highest digit down, reach the wanted
// sum. Each lane has eight digits. The search ends when all tokens of a digit are wanted, or when
// it has only one.
template <class Measure>
__device__ void choose_digit(int shift, Measure measure, Shared& s) {
  constexpr int kEach = kDigits / 32;
  const int lane = threadIdx.x;
  Sum own = 0;
  for (int i = 0; i < kEach; ++i) own += s.of_digit[lane * kEach + i];
  Sum reached = own;  // including all higher lanes
  for (int d = 1; d < 32; d *= 2) {
    const Sum higher = __shfl_down_sync(~0u, reached, d);
    if (lane + d < 32) reached += higher;
  }
  Sum wanted = s.wanted;
  __syncwarp();
  if (reached < wanted || reached - own >= wanted) return;
  wanted -= reached - own;
  int digit = lane * kEach + kEach - 1;
  for (; s.of_digit[digit] < wanted; --digit) wanted -= s.of_digit[digit];
  s.prefix = s.prefix << 8 | static_cast<Sum>(digit);
  s.wanted = wanted;
  s.found = s.of_digit[digit] == wanted;
  if (shift == 32)  // the weight is determined
    s.found |= s.of_digit[digit] == measure(__uint_as_float(static_cast<uint32_t>(s.prefix)), 0);
}

// A key that exactly the top tokens reach whose measures are needed for a sum of `wanted`, which
// the total must reach. Tokens of measure 0 may reach it too.
template <class Measure>
__device__ Sum threshold(const float* weights, int vocab, Sum wanted, Measure measure, Shared& s) {
  if (threadIdx.x == 0) s.prefix = 0, s.wanted = wanted, s.found = false;
  int shift = 56;
  for (;; shift -= 8) {
    if (threadIdx.x < kDigits) s.of_digit[threadIdx.x] = 0;
    __syncthreads();
    const Sum prefix = s.prefix;
    for (int t = threadIdx.x; t < vocab; t += kThreads) {
      const Sum key = key_of(weights[t], t), m = measure(weights[t], t);
      if (m > 0 && (shift == 56 || key >> (shift + 8) == prefix))
        atomicAdd(&s.of_digit[key >> shift & (kDigits - 1)], m);
    }
    __syncthreads();
    if (threadIdx.x < 32) choose_digit(shift, measure, s);
    __syncthreads();
    if (s.found || shift == 0) break;
  }
  const Sum key = s.prefix << shift;
  __syncthreads();
  return key;
}

// The first token at which the running sum exceeds `uniform` times the total. The range is divided
// among the warps until a part is one token.
template <class Measure>
__device__ int32_t draw_from(const float* weights, int vocab, double uniform, Measure measure,
                             Shared& s) {
  const Sum all = sum_of(weights, 0, vocab, measure, s);
  Sum left = min(static_cast<Sum>(uniform * static_cast<double>(all)), all - 1);
  int begin = 0, end = vocab;
  while (end - begin > 1) {
    const int each = (end - begin + kWarps - 1) / kWarps;
    const int first = begin + static_cast<int>(threadIdx.x / 32) * each;
    Sum sum = 0;
    for (int t = first + static_cast<int>(threadIdx.x % 32); t < min(first + each, end); t += 32)
      sum += measure(weights[t], t);
    sum = warp_total(sum);
    __syncthreads();
    if (threadIdx.x % 32 == 0) s.of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    int part = 0;
    for (; s.of_warp[part] <= left; ++part) left -= s.of_warp[part];
    begin += part * each;
    end = min(begin + each, end);
  }
  return begin;
}

}  // namespace

void draw(const Stream& stream, const DrawArgs& a) {
  check(a.vocab > 0 && a.vocab <= kMaxDrawTokens, "tokens to draw from");
  if (a.n > 0)
    launch(draw_kernel, {.grid_x = a.n, .threads = kThreads, .shared_bytes = sizeof(Shared)},
           stream, a);
}

}  // namespace tandem::gpu
