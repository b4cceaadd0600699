// One block draws the token of a row. Tokens are not sorted: a filter keeps those that are at least
// as likely as a threshold, which histograms of the weights determine. Atomic additions are in 32
// bits, which shared memory does without loops, and the most tokens of a usual row, whose weights
// are small, need none.
#include "core/invariant.h"
#include "device.h"
#include "gpu_kernels/sampling.h"

namespace tandem::gpu {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32, kBins = 2 * kThreads;

using Sum = unsigned long long;

struct Best {
  float value;
  int32_t token;  // kNotFinite invalidates the row
};

// Keeps tokens of larger weights, and those of this weight up to token `last`.
struct Threshold {
  uint32_t weight;  // the bits of a float: floats of at least 0 are ordered as their bits are
  int last;
};

// Weights whose bits are in [end - size, end), in bins of 2^shift, the largest first.
struct Interval {
  uint32_t end, size;
  int shift;
};
constexpr uint32_t kBitsOfOne = 127 << 23, kBinade = 1 << 23;  // bits of 1; a factor of two
// Weights of less than 2^-45 count nothing: the draw takes none of them.
constexpr Interval kLarge = {kBitsOfOne + 1, 16 * kBinade, 16};                     // above 2^-16
constexpr Interval kSmall = {kBitsOfOne - 16 * kBinade + 1, 29 * kBinade + 1, 17};  // from 2^-45
static_assert((kLarge.size - 1) >> kLarge.shift < kBins);
static_assert((kSmall.size - 1) >> kSmall.shift < kBins);

struct Bins {
  uint32_t count[kBins];             // tokens
  uint32_t low[kBins], high[kBins];  // the halves of the sums of their weights
};

// The bin in which sums from the largest weight on reach what is wanted.
struct Choice {
  int bin;          // -1: in none
  uint32_t count;   // tokens of the bin
  Sum wanted, all;  // of the bin's measure
};

struct Shared {
  DrawRow how;
  Best best[kWarps];
  Sum of_warp[kWarps];
  Choice choice;
  int begin;  // the part of the tokens that find() divides next, and
  Sum left;   // the sum that it must exceed
  Bins bins;
};

enum class Measure { kCount, kWeight };

__device__ Best likeliest(const DrawArgs& a, const float* row, Shared& s);
__device__ Sum weigh(const DrawArgs& a, const DrawRow& how, float max, float* row, Shared& s);
__device__ Sum weigh_kept(const float* weights, int vocab, Threshold least, Shared& s);
__device__ Threshold threshold(const float* weights, int vocab, Sum wanted, Measure measure,
                               Threshold kept, Shared& s);
template <class MeasureOf, class LeftOf>
__device__ int find(const float* weights, int vocab, MeasureOf measure, LeftOf left, Shared& s);

__device__ bool keeps(Threshold least, float weight, int token) {
  const uint32_t bits = __float_as_uint(weight);
  return bits > least.weight || (bits == least.weight && token <= least.last);
}

// weight * 2^45, rounded down, for weights from 0 to 1. Conversions to 64 bits are slow: some GPUs
// do two in a cycle.
__device__ Sum whole(float weight) {
  const uint32_t bits = __float_as_uint(weight), exponent = bits >> 23;
  return (Sum{(bits & 0x7fffff) | 0x800000} << 22) >> min(127 - exponent, 63u);
}

__global__ void __launch_bounds__(kThreads) draw_kernel(const __grid_constant__ DrawArgs a) {
  Shared& s = shared_memory<Shared>();
  if (threadIdx.x == 0) s.how = a.how[blockIdx.x];
  __syncthreads();
  const DrawRow how = s.how;
  float* const row = a.logits.data + how.row * a.logits.stride;
  const Best best = likeliest(a, row, s);
  int32_t token = best.token;
  if (token != kNotFinite && how.temperature > 0) {
    const bool top_k = how.top_k > 0 && how.top_k < a.vocab;
    Sum all = weigh(a, how, best.value, row, s);
    Threshold least = {0, a.vocab};
    if (top_k)
      least = threshold(row, a.vocab, static_cast<Sum>(how.top_k), Measure::kCount, least, s);
    if (how.top_p < 1) {
      if (top_k) all = weigh_kept(row, a.vocab, least, s);
      const auto wanted = static_cast<Sum>(ceil(double{how.top_p} * static_cast<double>(all)));
      least = threshold(row, a.vocab, wanted, Measure::kWeight, least, s);
    }
    token = find(
        row, a.vocab,
        [&](float w, int t) { return keeps(least, w, t) && w >= how.min_p ? whole(w) : 0; },
        [&](Sum sum) {
          return min(static_cast<Sum>(how.uniform * static_cast<double>(sum)), sum - 1);
        },
        s);
  }
  if (threadIdx.x == 0) a.tokens[blockIdx.x] = token;
}

// Calls f(value, token) for tokens first, first + stride, .. before `end`. Eight loads are in
// flight.
template <class F>
__device__ void for_each(const float* row, int first, int end, int stride, F f) {
  constexpr int kLoads = 8;
  for (; first < end; first += kLoads * stride) {
    float v[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) v[i] = first + i * stride < end ? row[first + i * stride] : 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (first + i * stride < end) f(v[i], first + i * stride);
  }
}
template <class F>
__device__ void for_each(const float* row, int vocab, F f) {
  for_each(row, threadIdx.x, vocab, kThreads, f);
}

// The tokens of a warp share a word.
__device__ bool is_allowed(const DrawArgs& a, int token) {
  return a.allowed[token / 32] >> threadIdx.x % 32 & 1;
}

__device__ Best likelier(Best a, Best b) {
  if (a.token == kNotFinite || b.token == kNotFinite) return {0, kNotFinite};
  return a.value > b.value || (a.value == b.value && a.token < b.token) ? a : b;
}

__device__ Best likeliest(const DrawArgs& a, const float* row, Shared& s) {
  Best best = {-INFINITY, a.vocab};
  bool finite = true;
  for_each(row, a.vocab, [&](float v, int t) {
    finite &= fabsf(v) < INFINITY;
    if (is_allowed(a, t) && v > best.value) best = {v, t};
  });
  if (!finite) best.token = kNotFinite;
  for (int d = 16; d > 0; d /= 2)
    best =
        likelier(best, {__shfl_xor_sync(~0u, best.value, d), __shfl_xor_sync(~0u, best.token, d)});
  if (threadIdx.x % 32 == 0) s.best[threadIdx.x / 32] = best;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) best = likelier(best, s.best[w]);
  return best;
}

// The sum of the lanes up to this one.
__device__ Sum prefix_sum(Sum v) {
  const int lane = threadIdx.x % 32;
  for (int d = 1; d < 32; d *= 2) {
    const Sum lower = __shfl_sync(~0u, v, lane - d);
    if (lane >= d) v += lower;
  }
  return v;
}

__device__ Sum warp_total(Sum v) {
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
  return v;
}

struct Totals {
  Sum before, all;  // of the warps before this one; of all warps
};
__device__ Totals totals(Sum of_this_warp, Shared& s) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();  // other threads may still read the last sums
  if (lane == 0) s.of_warp[warp] = of_this_warp;
  __syncthreads();
  const Sum reached = prefix_sum(s.of_warp[lane]);
  return {__shfl_sync(~0u, reached, warp) - of_this_warp, __shfl_sync(~0u, reached, 31)};
}

__device__ void clear_bins(Bins& bins) {
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads)
    bins.count[bin] = bins.low[bin] = bins.high[bin] = 0;
}

__device__ void add(float weight, Sum sum, Interval in, Bins& bins) {
  const uint32_t below = in.end - 1 - __float_as_uint(weight);
  if (below >= in.size) return;
  const uint32_t bin = below >> in.shift, low = static_cast<uint32_t>(sum);
  atomicAdd(&bins.count[bin], 1u);
  const uint32_t before = atomicAdd(&bins.low[bin], low);
  atomicAdd(&bins.high[bin], static_cast<uint32_t>(sum >> 32) + (before + low < before));
}

// Replaces logits with weights, of which the likeliest has 1, and fills the bins of kLarge. Returns
// the sum.
__device__ Sum weigh(const DrawArgs& a, const DrawRow& how, float max, float* row, Shared& s) {
  clear_bins(s.bins);
  __syncthreads();
  const bool filters = how.top_k > 0 || how.top_p < 1;
  Sum own = 0;
  for_each(row, a.vocab, [&](float logit, int t) {
    const float w = is_allowed(a, t) ? expf((logit - max) / how.temperature) : 0;
    row[t] = w;
    if (!filters) return;
    const Sum sum = whole(w);
    own += sum;
    add(w, sum, kLarge, s.bins);
  });
  return totals(warp_total(own), s).all;
}

// The same for the tokens that a threshold keeps.
__device__ Sum weigh_kept(const float* weights, int vocab, Threshold least, Shared& s) {
  clear_bins(s.bins);
  __syncthreads();
  Sum own = 0;
  for_each(weights, vocab, [&](float w, int t) {
    if (!keeps(least, w, t)) return;
    const Sum sum = whole(w);
    own += sum;
    add(w, sum, kLarge, s.bins);
  });
  return totals(warp_total(own), s).all;
}

__device__ void fill(const float* weights, int vocab, Interval in, Threshold kept, Shared& s) {
  clear_bins(s.bins);
  __syncthreads();
  for_each(weights, vocab, [&](float w, int t) {
    if (in.end - 1 - __float_as_uint(w) < in.size && keeps(kept, w, t))
      add(w, whole(w), in, s.bins);
  });
  __syncthreads();
}

// Each thread has two adjacent bins.
__device__ Choice choose_bin(Sum wanted, Measure measure, Shared& s) {
  const int first = 2 * static_cast<int>(threadIdx.x);
  const auto sum_of = [&](int bin) {
    return measure == Measure::kCount ? s.bins.count[bin]
                                      : Sum{s.bins.high[bin]} << 32 | s.bins.low[bin];
  };
  const Sum own[2] = {sum_of(first), sum_of(first + 1)};
  if (threadIdx.x == 0) s.choice.bin = -1;
  const Sum in_warp = prefix_sum(own[0] + own[1]);
  const Totals t = totals(__shfl_sync(~0u, in_warp, 31), s);
  Sum before = t.before + in_warp - own[0] - own[1];
  for (int i = 0; i < 2; ++i) {
    if (before < wanted && wanted <= before + own[i])
      s.choice = {first + i, s.bins.count[first + i], wanted - before, own[i]};
    before += own[i];
  }
  __syncthreads();
  const Choice c = s.choice;
  return c.bin >= 0 ? c : Choice{-1, 0, wanted - t.all, 0};
}

// The threshold that the likeliest tokens reach whose measures are needed for a sum of `wanted`,
// among the tokens `kept`, whose bins of kLarge are filled.
__device__ Threshold threshold(const float* weights, int vocab, Sum wanted, Measure measure,
                               Threshold kept, Shared& s) {
  Interval in = kLarge;
  Choice c = choose_bin(wanted, measure, s);
  if (c.bin < 0) {
    in = kSmall;
    fill(weights, vocab, in, kept, s);
    c = choose_bin(c.wanted, measure, s);
    if (c.bin < 0) return kept;  // there are fewer tokens
  }
  for (;;) {
    const uint32_t end = in.end - (static_cast<uint32_t>(c.bin) << in.shift), size = 1u << in.shift;
    const uint32_t least = end - size;
    if (c.wanted == c.all || c.count == 1)  // the bin may reach below what is kept
      return least > kept.weight ? Threshold{least, vocab} : kept;
    if (size == 1) {  // tokens of one weight, the first of which are wanted
      const Sum each = measure == Measure::kCount ? 1 : whole(__uint_as_float(least));
      const Sum n = (c.wanted + each - 1) / each;
      const auto is_one = [&](float w, int t) {
        return Sum{__float_as_uint(w) == least && keeps(kept, w, t)};
      };
      return {least, find(
                         weights, vocab, is_one, [&](Sum) { return n - 1; }, s)};
    }
    in = {end, size, max(in.shift - 11, 0)};
    fill(weights, vocab, in, kept, s);
    c = choose_bin(c.wanted, measure, s);
  }
}

// The first token at which the running sum exceeds left(sum of all). The range is divided among the
// warps until a part is one token.
template <class MeasureOf, class LeftOf>
__device__ int find(const float* weights, int vocab, MeasureOf measure, LeftOf left, Shared& s) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int begin = 0, end = vocab;
  Sum rest = 0;
  for (bool first = true; first || end - begin > 1; first = false) {
    const int each = (end - begin + kWarps - 1) / kWarps, of_warp = begin + warp * each;
    Sum own = 0;
    for_each(weights, of_warp + lane, min(of_warp + each, end), 32,
             [&](float w, int t) { own += measure(w, t); });
    own = warp_total(own);
    const Totals t = totals(own, s);
    if (first) rest = left(t.all);
    if (lane == 0 && t.before <= rest && rest < t.before + own)
      s.begin = of_warp, s.left = rest - t.before;
    __syncthreads();
    begin = s.begin, rest = s.left;
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
