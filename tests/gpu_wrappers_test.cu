// Every function of device.h according to the PTX manual. The same program tests the emulator and a
// GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "device.h"
#include "tests/gpu_memory.h"

namespace tandem::gpu {
namespace {

struct WrapperArgs {
  float* out;  // [n, 32]: n numbers of each lane
  const bf16* in;
};

// The numbers that the lanes wrote: result[i][lane].
std::vector<std::vector<float>> results(void (*kernel)(WrapperArgs), int n,
                                        const std::vector<bf16>& in = {},
                                        int64_t shared_bytes = 0) {
  Stream stream;
  const Buffer out = nans_on_gpu<float>(int64_t{n} * 32);
  const Buffer din = in.empty() ? Buffer() : on_gpu(stream, in);
  launch(kernel, {.threads = 32, .shared_bytes = shared_bytes}, stream,
         {.out = out.as<float>(), .in = din.as<bf16>()});
  const auto all = from_gpu<float>(stream, out);
  std::vector<std::vector<float>> rows;
  for (int i = 0; i < n; ++i) rows.emplace_back(all.begin() + i * 32, all.begin() + (i + 1) * 32);
  return rows;
}

void expect_lanes(const std::vector<float>& got, const std::function<float(int)>& want) {
  for (int lane = 0; lane < 32; ++lane) EXPECT_EQ(got[lane], want(lane)) << "lane " << lane;
}

__global__ void shuffles(WrapperArgs a) {
  const int lane = threadIdx.x, v = 100 + lane;
  a.out[lane] = __shfl_sync(~0u, v, 5);
  a.out[32 + lane] = __shfl_sync(~0u, v, 5, 8);  // lane 5 of every 8 lanes
  a.out[64 + lane] = __shfl_xor_sync(~0u, v, 3);
  a.out[96 + lane] = __shfl_down_sync(~0u, v, 30);
  a.out[128 + lane] = __shfl_down_sync(~0u, v, 2, 4);
  a.out[160 + lane] = static_cast<float>(__ballot_sync(~0u, lane % 5 == 0) % 1000003);
  a.out[192 + lane] = lane < 16 ? __shfl_xor_sync(0xffffu, v, 8) : 0;  // half a warp
}

TEST(Wrappers, LanesExchangeValues) {
  const auto got = results(shuffles, 7);
  uint32_t ballot = 0;
  for (int lane = 0; lane < 32; lane += 5) ballot |= 1u << lane;
  expect_lanes(got[0], [](int) { return 105; });
  expect_lanes(got[1], [](int lane) { return 105 + lane / 8 * 8; });
  expect_lanes(got[2], [](int lane) { return 100 + (lane ^ 3); });
  expect_lanes(got[3], [](int lane) { return 100 + (lane < 2 ? lane + 30 : lane); });
  expect_lanes(got[4], [](int lane) { return 100 + (lane % 4 < 2 ? lane + 2 : lane); });
  expect_lanes(got[5], [&](int) { return static_cast<float>(ballot % 1000003); });
  expect_lanes(got[6], [](int lane) { return lane < 16 ? 100 + (lane ^ 8) : 0; });
}

struct Matrices {
  alignas(16) bf16 rows[32][8];
};

__device__ float low(uint32_t pair) { return to_float(bf16{static_cast<uint16_t>(pair)}); }
__device__ float high(uint32_t pair) { return to_float(bf16{static_cast<uint16_t>(pair >> 16)}); }

// Element (row r, column c) of matrix i is in[64 i + 8 r + c].
__global__ void matrix_loads(WrapperArgs a) {
  Matrices& s = shared_memory<Matrices>();
  const int lane = threadIdx.x;
  for (int i = 0; i < 8; ++i) s.rows[lane][i] = a.in[lane * 8 + i];
  __syncthreads();
  uint32_t plain[4], transposed[4];
  ldmatrix_x4(plain, s.rows[lane]);
  ldmatrix_x4_trans(transposed, s.rows[lane]);
  for (int i = 0; i < 4; ++i) {
    a.out[(4 * i) * 32 + lane] = low(plain[i]);
    a.out[(4 * i + 1) * 32 + lane] = high(plain[i]);
    a.out[(4 * i + 2) * 32 + lane] = low(transposed[i]);
    a.out[(4 * i + 3) * 32 + lane] = high(transposed[i]);
  }
}

std::vector<bf16> counting(int n) {
  std::vector<bf16> v;
  for (int i = 0; i < n; ++i) v.push_back(narrow(static_cast<float>(i)));
  return v;
}

TEST(Wrappers, MatricesAreLoadedAndTransposed) {
  const auto got = results(matrix_loads, 16, counting(256), sizeof(Matrices));
  for (int i = 0; i < 4; ++i) {
    const auto element = [&](int row, int column) { return 64 * i + 8 * row + column; };
    expect_lanes(got[4 * i], [&](int l) { return element(l / 4, l % 4 * 2); });
    expect_lanes(got[4 * i + 1], [&](int l) { return element(l / 4, l % 4 * 2 + 1); });
    expect_lanes(got[4 * i + 2], [&](int l) { return element(l % 4 * 2, l / 4); });
    expect_lanes(got[4 * i + 3], [&](int l) { return element(l % 4 * 2 + 1, l / 4); });
  }
}

// a[16, 16] is in[0..255], b[16, 8] is in[256..383], both row-major; the numbers are small
// integers.
__global__ void tensor_core(WrapperArgs m) {
  const int lane = threadIdx.x;
  const auto a_at = [&](int row, int column) { return uint32_t{m.in[row * 16 + column].bits}; };
  const auto b_at = [&](int row, int column) {
    return uint32_t{m.in[256 + row * 8 + column].bits};
  };
  uint32_t a[4], b[2];
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i % 2 * 8, column = lane % 4 * 2 + i / 2 * 8;
    a[i] = a_at(row, column) | a_at(row, column + 1) << 16;
  }
  for (int i = 0; i < 2; ++i) {
    const int row = lane % 4 * 2 + i * 8, column = lane / 4;
    b[i] = b_at(row, column) | b_at(row + 1, column) << 16;
  }
  float c[4] = {1, 2, 3, 4};
  mma_m16n8k16(c, a, b[0], b[1]);
  for (int i = 0; i < 4; ++i) m.out[i * 32 + lane] = c[i];
}

TEST(Wrappers, TensorCoreMultiplies) {
  std::vector<bf16> in;
  for (int i = 0; i < 384; ++i) in.push_back(narrow(static_cast<float>(i * 7 % 23 - 11)));
  const auto got = results(tensor_core, 4, in);
  for (int i = 0; i < 4; ++i)
    expect_lanes(got[i], [&](int lane) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      float sum = 1 + i;
      for (int k = 0; k < 16; ++k) sum += widen(in[row * 16 + k]) * widen(in[256 + k * 8 + column]);
      return sum;
    });
}

// a[16, 32] is the first 512 bytes of `in`, row-major; b[32, 8] is the next 256, column-major.
__global__ void fp8_tensor_core(WrapperArgs m) {
  const int lane = threadIdx.x;
  const auto* a_codes = reinterpret_cast<const uint8_t*>(m.in);
  const auto* b_codes = a_codes + 16 * 32;
  const auto word = [](const uint8_t* codes) {
    return codes[0] | codes[1] << 8 | codes[2] << 16 | static_cast<uint32_t>(codes[3]) << 24;
  };
  uint32_t a[4], b[2];
  for (int i = 0; i < 4; ++i)
    a[i] = word(a_codes + (lane / 4 + i % 2 * 8) * 32 + i / 2 * 16 + lane % 4 * 4);
  for (int i = 0; i < 2; ++i) b[i] = word(b_codes + lane / 4 * 32 + i * 16 + lane % 4 * 4);
  float c[4] = {1, 2, 3, 4};
  mma_m16n8k32_e4m3(c, a, b[0], b[1]);
  for (int i = 0; i < 4; ++i) m.out[i * 32 + lane] = c[i];
}

// `code` gives the 768 codes; `error` is the bound relative to the sum of magnitudes.
void expect_fp8_products(const std::function<uint8_t(int)>& code, double error) {
  std::vector<bf16> in;  // two codes each
  for (int i = 0; i < 768; i += 2)
    in.push_back({static_cast<uint16_t>(code(i) | code(i + 1) << 8)});
  const auto value = [&](int i) { return double{widen(fp8_e4m3{code(i)})}; };
  const auto got = results(fp8_tensor_core, 4, in);
  for (int i = 0; i < 4; ++i)
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      double sum = 1 + i, magnitude = sum;
      for (int k = 0; k < 32; ++k) {
        const double product = value(row * 32 + k) * value(512 + column * 32 + k);
        sum += product;
        magnitude += std::abs(product);
      }
      EXPECT_NEAR(got[i][lane], sum, error * magnitude) << row << ", " << column;
    }
}

// Integers from -8 to 8, whose sums any accumulator represents; then every finite code, subnormals
// included. An emulated GPU sums floats, a real one keeps at least 13 bits below the leading bit of
// the largest product.
TEST(Wrappers, TensorCoreMultipliesFp8) {
  if (!open_gpu().fp8_mma) GTEST_SKIP() << "no FP8 mma";
  const uint8_t whole[] = {0, 0x38, 0x40, 0x44, 0x48, 0x4a, 0x4c, 0x4e, 0x50};  // codes of 0 to 8
  expect_fp8_products(
      [&](int i) {
        return static_cast<uint8_t>(whole[i * 31 % 37 % 9] | (i * 7 % 5 < 2 ? 0x80 : 0));
      },
      0);
  const double error = open_gpu().emulated ? 32 * 0x1p-24 : 0x1p-10;
  for (int shift = 0; shift < 254; shift += 23)
    expect_fp8_products(
        [&](int i) {
          const auto code = static_cast<uint8_t>(i * 89 + shift + i / 256);
          return static_cast<uint8_t>((code & 0x7f) == 0x7f ? code - 1 : code);
        },
        error);
}

struct Copies {
  alignas(16) bf16 rows[2][32][8];
};

// Two groups of copies; the second is waited for after the first has been read.
__global__ void async_copies(WrapperArgs a) {
  Copies& s = shared_memory<Copies>();
  const int lane = threadIdx.x;
  for (int group = 0; group < 2; ++group) {
    cp_async_16(s.rows[group][lane], a.in + (group * 32 + lane) * 8, lane != 3);
    cp_async_commit();
  }
  cp_async_wait<1>();
  __syncthreads();
  a.out[lane] = to_float(s.rows[0][31 - lane][7]);
  cp_async_wait<0>();
  __syncthreads();
  a.out[32 + lane] = to_float(s.rows[1][31 - lane][2]);
}

TEST(Wrappers, CopiesArriveInGroupsOrAreZero) {
  std::vector<bf16> in;
  for (int i = 0; i < 512; ++i) in.push_back(narrow(static_cast<float>(i % 251)));
  const auto got = results(async_copies, 2, in, sizeof(Copies));
  for (int group = 0; group < 2; ++group)
    expect_lanes(got[group], [&](int lane) {
      const int row = 31 - lane;
      return row == 3 ? 0 : static_cast<float>((group * 256 + row * 8 + (group ? 2 : 7)) % 251);
    });
}

__global__ void conversions(WrapperArgs a) {
  const int lane = threadIdx.x;
  for (int i = 0; i < 8; ++i)
    a.out[i * 32 + lane] = to_float(fp8_e4m3{static_cast<uint8_t>(i * 32 + lane)});
  a.out[8 * 32 + lane] = to_float(to_bf16(1 + lane / 256.0f));
  a.out[9 * 32 + lane] = rsqrtf(4.0f + lane) * sqrtf(4.0f + lane);
  a.out[10 * 32 + lane] = static_cast<float>(__popc(lane) + 100 * __ffs(lane));
}

TEST(Wrappers, NumbersAreConverted) {
  const auto got = results(conversions, 11);
  for (int code = 0; code < 256; ++code) {
    const float want = widen(fp8_e4m3{static_cast<uint8_t>(code)}), is = got[code / 32][code % 32];
    if (std::isnan(want))
      EXPECT_TRUE(std::isnan(is)) << code;
    else
      EXPECT_EQ(is, want) << code;
  }
  expect_lanes(got[8], [](int lane) { return widen(narrow(1 + lane / 256.0f)); });
  for (const float v : got[9]) EXPECT_NEAR(v, 1, 1e-6);
  expect_lanes(got[10], [](int lane) {
    return static_cast<float>(__builtin_popcount(lane) + 100 * __builtin_ffs(lane));
  });
}

// Blocks count themselves; the last one, which sees the writes of all others, computes the sum.
struct CountArgs {
  uint32_t* count;
  float* parts;  // [blocks]
  float* sum;
};
__global__ void last_block_adds(CountArgs a) {
  if (threadIdx.x > 0) return;
  a.parts[blockIdx.x] = static_cast<float>(blockIdx.x + 1);
  if (add_acq_rel(a.count, 1) + 1 != gridDim.x) return;
  float sum = 0;
  for (unsigned i = 0; i < gridDim.x; ++i) sum += a.parts[i];
  *a.sum = sum;
  store_release(a.count, 0);
}

TEST(Wrappers, AtomicsOrderMemory) {
  Stream stream;
  const Buffer count = on_gpu(stream, std::vector<uint32_t>{0});
  const Buffer parts = nans_on_gpu<float>(50), sum = nans_on_gpu<float>(1);
  const CountArgs args = {count.as<uint32_t>(), parts.as<float>(), sum.as<float>()};
  launch(last_block_adds, {.grid_x = 50, .threads = 32}, stream, args);
  EXPECT_EQ(from_gpu<float>(stream, sum)[0], 50 * 51 / 2);
  EXPECT_EQ(from_gpu<uint32_t>(stream, count)[0], 0u);
}

// A graph is recorded once; its second branch forks and joins by events.
struct AddArgs {
  float* to;
  const float* from;
};
__global__ void add_one(AddArgs a) { a.to[threadIdx.x] = a.from[threadIdx.x] + 1; }

TEST(Runtime, GraphsAreReplayedWithForksAndJoins) {
  Stream stream, side;
  Event fork, join;
  const Buffer x = on_gpu(stream, std::vector<float>(32, 1)), y = nans_on_gpu<float>(32),
               z = nans_on_gpu<float>(32);
  const Graph graph = stream.capture([&] {
    launch(add_one, {.threads = 32}, stream, {y.as<float>(), x.as<float>()});
    stream.record(fork);
    side.wait_for(fork);
    launch(add_one, {.threads = 32}, side, {z.as<float>(), y.as<float>()});
    side.record(join);
    stream.wait_for(join);
    launch(add_one, {.threads = 32}, stream, {x.as<float>(), z.as<float>()});
  });
  EXPECT_EQ(from_gpu<float>(stream, x), std::vector<float>(32, 1));
  for (int i = 0; i < 3; ++i) stream.replay(graph);
  EXPECT_EQ(from_gpu<float>(stream, x), std::vector<float>(32, 10));
}

TEST(Runtime, EventsOrderStreams) {
  Stream first, second;
  Event done;
  done.wait();  // nothing was recorded
  const Buffer x = on_gpu(first, std::vector<float>(32, 0)), y = nans_on_gpu<float>(32);
  for (int i = 0; i < 100; ++i)
    launch(add_one, {.threads = 32}, first, {x.as<float>(), x.as<float>()});
  first.record(done);
  second.wait_for(done);
  launch(add_one, {.threads = 32}, second, {y.as<float>(), x.as<float>()});
  done.wait();
  EXPECT_EQ(from_gpu<float>(second, y), std::vector<float>(32, 101));
}

}  // namespace
}  // namespace tandem::gpu
