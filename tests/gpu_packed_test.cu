// Every function of packed.h, and the CUDA atomics and __syncwarp that kernels use, according to
// the PTX manual. The same program tests the emulator and a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>

#include "device.h"
#include "packed.h"
#include "tests/gpu_memory.h"

namespace tandem::gpu {
namespace {

struct PackedArgs {
  uint32_t* out;
  const uint32_t* in;
  int n;
};

constexpr int kPackers = 64;

// Runs a kernel with one thread for each of n elements of `in`; each thread writes `each` words.
std::vector<uint32_t> packed_results(void (*kernel)(PackedArgs), int n, int each,
                                     const std::vector<uint32_t>& in = {0},
                                     int64_t shared_bytes = 0) {
  Stream stream;
  const Buffer out = nans_on_gpu<uint32_t>(int64_t{n} * each), din = on_gpu(stream, in);
  launch(
      kernel,
      {.grid_x = (n + kPackers - 1) / kPackers, .threads = kPackers, .shared_bytes = shared_bytes},
      stream, {out.as<uint32_t>(), din.as<uint32_t>(), n});
  return from_gpu<uint32_t>(stream, out);
}

uint32_t bits(float v) { return std::bit_cast<uint32_t>(v); }
float number(uint32_t v) { return std::bit_cast<float>(v); }
float low_of(uint32_t pair) { return number(pair << 16); }
float high_of(uint32_t pair) { return number(pair & 0xffff0000u); }
uint32_t pair_of(bf16 low, bf16 high) { return low.bits | uint32_t{high.bits} << 16; }

__global__ void packs(PackedArgs a) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= a.n) return;
  const uint32_t pair = pack_bf16(__uint_as_float(a.in[2 * i]), __uint_as_float(a.in[2 * i + 1]));
  a.out[3 * i] = pair;
  a.out[3 * i + 1] = __float_as_uint(bf16_low(pair));
  a.out[3 * i + 2] = __float_as_uint(bf16_high(pair));
}

TEST(Packed, PairsAreRoundedToEven) {
  // Ties in both directions, numbers that round up to the next power of two and to infinity,
  // subnormals.
  std::vector<uint32_t> in = {0x3f808000, 0x3f818000, 0x3f808001, 0x3f807fff, 0x3fffffff,
                              0x7f7fffff, 0x80000000, 0x00000000, 0x7f800000, 0xff800000,
                              0x00018000, 0x80008000, 0x00000001, 0x007fffff};
  std::mt19937 rng(1);
  while (in.size() < 400)
    if (const uint32_t v = rng(); std::isfinite(number(v))) in.push_back(v);
  const int n = static_cast<int>(in.size()) / 2;
  const auto got = packed_results(packs, n, 3, in);
  for (int i = 0; i < n; ++i) {
    const bf16 low = narrow(number(in[2 * i])), high = narrow(number(in[2 * i + 1]));
    EXPECT_EQ(got[3 * i], pair_of(low, high)) << std::hex << in[2 * i] << " " << in[2 * i + 1];
    EXPECT_EQ(got[3 * i + 1], bits(widen(low)));
    EXPECT_EQ(got[3 * i + 2], bits(widen(high)));
  }
}

__global__ void multiplies(PackedArgs a) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < a.n) a.out[i] = fma_bf16x2(a.in[3 * i], a.in[3 * i + 1], a.in[3 * i + 2]);
}

// e4m3.h requires that subnormals times a power of two, plus -0, are exact.
TEST(Packed, SubnormalsAreMultipliedExactly) {
  constexpr uint32_t kTwoTo120 = 0x7b807b80, kMinusZero = 0x80008000;
  std::vector<uint32_t> in;
  for (uint32_t v = 0; v < 0x80; v += 3) {
    const uint32_t pair = v | (0x8000 | (v + 1)) << 16;
    in.insert(in.end(), {pair, kTwoTo120, kMinusZero});
  }
  const int n = static_cast<int>(in.size()) / 3;
  const auto got = packed_results(multiplies, n, 1, in);
  for (int i = 0; i < n; ++i) {
    EXPECT_EQ(bits(low_of(got[i])), bits(low_of(in[3 * i]) * 0x1p120f)) << i;
    EXPECT_EQ(bits(high_of(got[i])), bits(high_of(in[3 * i]) * 0x1p120f)) << i;
  }
}

// A product of 8-bit mantissas and a summand of similar size are exact in double and rounded once.
TEST(Packed, SumsAreRoundedOnce) {
  std::mt19937 rng(2);
  const auto some = [&] { return narrow((1 + rng() % 128 / 128.f) * (rng() % 2 ? 1.f : -1.f)); };
  std::vector<uint32_t> in;
  for (int i = 0; i < 300; ++i) in.push_back(pair_of(some(), some()));
  const auto got = packed_results(multiplies, 100, 1, in);
  for (int i = 0; i < 100; ++i) {
    const auto rounded = [&](auto half) {
      const double sum = double{half(in[3 * i])} * half(in[3 * i + 1]) + half(in[3 * i + 2]);
      return bits(widen(narrow(static_cast<float>(sum))));
    };
    EXPECT_EQ(bits(low_of(got[i])), rounded(low_of)) << i;
    EXPECT_EQ(bits(high_of(got[i])), rounded(high_of)) << i;
  }
}

__global__ void selects(PackedArgs a) {
  const int i = threadIdx.x;
  if (i < a.n) a.out[i] = select_bytes(a.in[0], a.in[1], a.in[2 + i]);
}

TEST(Packed, BytesAreSelected) {
  const std::vector<uint32_t> in = {0x33221100, 0x77665544, 0x3210, 0x7654,
                                    0x1404,     0x3424,     0x0000, 0x7007};
  EXPECT_EQ(packed_results(selects, 6, 1, in),
            (std::vector<uint32_t>{0x33221100, 0x77665544, 0x11440044, 0x33442244, 0, 0x77000077}));
}

__global__ void loads(PackedArgs a) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= a.n) return;
  const uint4 v = load_once_16(kept(a.in + 4 * (a.n - 1 - i)));
  a.out[4 * i] = v.x;
  a.out[4 * i + 1] = v.y;
  a.out[4 * i + 2] = v.z;
  a.out[4 * i + 3] = v.w;
}

TEST(Packed, SixteenBytesAreLoaded) {
  constexpr int kLoads = 100;
  std::vector<uint32_t> in(4 * kLoads);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<uint32_t>(i * 2654435761u);
  const auto got = packed_results(loads, kLoads, 4, in);
  for (int i = 0; i < 4 * kLoads; ++i)
    EXPECT_EQ(got[i], in[4 * (kLoads - 1 - i / 4) + i % 4]) << "word " << i;
}

__global__ void exponentials(PackedArgs a) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < a.n) a.out[i] = __float_as_uint(exp2_approx(__uint_as_float(a.in[i])));
}

TEST(Packed, PowersOfTwo) {
  std::vector<float> x = {0, 1, -1, 10, -126, -INFINITY};
  std::mt19937 rng(3);
  for (int i = 0; i < 200; ++i) x.push_back(std::uniform_real_distribution<float>(-125, 20)(rng));
  std::vector<uint32_t> in;
  for (const float v : x) in.push_back(bits(v));
  in.push_back(bits(-140));  // too small: 0 on a GPU
  const auto got = packed_results(exponentials, static_cast<int>(in.size()), 1, in);
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = std::exp2(double{x[i]});
    EXPECT_NEAR(number(got[i]), want, 4 * std::exp2(-23) * want) << x[i];
  }
  EXPECT_LE(number(got.back()), 0x1p-126f);
  EXPECT_GE(number(got.back()), 0);
}

// The last block to arrive sees the writes of all others, and every block gets a different number.
__global__ void arrivals(PackedArgs a) {
  if (threadIdx.x > 0) return;
  uint32_t* const count = a.out + gridDim.x;
  a.out[blockIdx.x] = blockIdx.x + 1;
  if (arrive(count) + 1 != gridDim.x) return;
  uint32_t sum = 0;
  for (unsigned i = 0; i < gridDim.x; ++i) sum += a.out[i];
  a.out[gridDim.x + 1] = sum;
}

TEST(Packed, TheLastToArriveSeesTheOthers) {
  constexpr int kBlocks = 40;
  Stream stream;
  std::vector<uint32_t> zeros(kBlocks + 2);
  const Buffer out = on_gpu(stream, zeros);
  launch(arrivals, {.grid_x = kBlocks, .threads = 32}, stream, {out.as<uint32_t>(), nullptr, 0});
  const auto got = from_gpu<uint32_t>(stream, out);
  EXPECT_EQ(got[kBlocks], static_cast<uint32_t>(kBlocks));
  EXPECT_EQ(got[kBlocks + 1], kBlocks * (kBlocks + 1) / 2u);
}

struct PackedShared {
  uint32_t slot[kPackers];
  uint64_t sum;
  uint32_t count, most;
};

// Each warp reverses its own slots twice, with only __syncwarp in between.
__global__ void turns(PackedArgs a) {
  PackedShared& s = shared_memory<PackedShared>();
  const int i = threadIdx.x, other = i / 32 * 32 + 31 - i % 32;
  s.slot[i] = a.in[i];
  __syncwarp();
  const uint32_t turned = s.slot[other];
  __syncwarp();
  s.slot[i] = turned + 1;
  __syncwarp();
  a.out[i] = s.slot[other];
}

TEST(Packed, SyncwarpOrdersAWarpsMemory) {
  std::vector<uint32_t> in(kPackers);
  for (int i = 0; i < kPackers; ++i) in[i] = 100 + i;
  const auto got = packed_results(turns, kPackers, 1, in, sizeof(PackedShared));
  for (int i = 0; i < kPackers; ++i) EXPECT_EQ(got[i], in[i] + 1) << "lane " << i;
}

__global__ void adds(PackedArgs a) {
  PackedShared& s = shared_memory<PackedShared>();
  const int i = threadIdx.x;
  if (i == 0) s.sum = s.count = s.most = 0;
  __syncthreads();
  atomicAdd(reinterpret_cast<unsigned long long*>(&s.sum), 0x100000000ull + a.in[i]);
  a.out[i] = atomicAdd(&s.count, 1u);
  atomicMax(&s.most, a.in[i]);
  __syncthreads();
  if (i > 0) return;
  a.out[kPackers] = static_cast<uint32_t>(s.sum);
  a.out[kPackers + 1] = static_cast<uint32_t>(s.sum >> 32);
  a.out[kPackers + 2] = s.most;
  a.out[kPackers + 3] = atomicExch(&s.count, 7u);
  a.out[kPackers + 4] = atomicCAS(&s.count, 7u, 9u);
  a.out[kPackers + 5] = atomicCAS(&s.count, 7u, 8u);
}

TEST(Packed, AtomicsOfSharedMemory) {
  std::vector<uint32_t> in(kPackers);
  uint64_t sum = 0;
  for (int i = 0; i < kPackers; ++i) {
    in[i] = 0xf0000000u + static_cast<uint32_t>(i * 7919 % 1000);
    sum += 0x100000000ull + in[i];
  }
  Stream stream;
  const Buffer out = nans_on_gpu<uint32_t>(kPackers + 6), din = on_gpu(stream, in);
  launch(adds, {.threads = kPackers, .shared_bytes = sizeof(PackedShared)}, stream,
         {out.as<uint32_t>(), din.as<uint32_t>(), kPackers});
  auto got = from_gpu<uint32_t>(stream, out);
  EXPECT_EQ(got[kPackers], static_cast<uint32_t>(sum));
  EXPECT_EQ(got[kPackers + 1], static_cast<uint32_t>(sum >> 32));
  EXPECT_EQ(got[kPackers + 2], *std::max_element(in.begin(), in.end()));
  EXPECT_EQ(got[kPackers + 3], static_cast<uint32_t>(kPackers));
  EXPECT_EQ(got[kPackers + 4], 7u);
  EXPECT_EQ(got[kPackers + 5], 9u);
  std::sort(got.begin(), got.begin() + kPackers);  // every number occurs once
  for (int i = 0; i < kPackers; ++i) EXPECT_EQ(got[i], static_cast<uint32_t>(i));
}

}  // namespace
}  // namespace tandem::gpu
