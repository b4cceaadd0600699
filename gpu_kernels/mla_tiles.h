// Loads tiles of 16 tokens of the latent cache into shared memory for mla_decode.cu, as BF16 or
// decoded from FP8.
#pragma once
#include "device.h"
#include "gpu_kernels/attention.h"
#include "gpu_kernels/e4m3.h"
#include "gpu_kernels/softmax.h"

namespace tandem::gpu::mla {

constexpr int kThreads = 256;
constexpr int kRows = 64, kTile = 16;
constexpr int kMinTiles = 8;
constexpr int kScoreColumns = kMaxCacheDim / 4, kValueColumns = kMaxKvRank / 4;  // per warp
constexpr int kRowNumbers = kMaxCacheDim + 8;  // odd in 16-byte units: no bank conflicts

// Tokens [begin, end) of a sequence; begin is a multiple of kTile, so a tile lies in one page.
struct Context {
  const LatentCache* cache;
  const int32_t* pages;
  int begin, end;
};

template <int kStages>
struct TileMemory {
  alignas(16) bf16 kv[kStages][kTile][kRowNumbers];
  alignas(16) float part[4][kRows][kTile + 4];  // scores of each group of columns
  alignas(16) bf16 weights[kRows][kTile + 8];
  // Factors of the sums before this tile; at the end 1 / sum.
  float rescale[kRows];
};

// Interface of both kinds: after advance(t) and a barrier all threads see tile t, and later tiles
// are in flight. Tiles beyond the context may be requested and are not copied. Rows beyond it
// become zeros: weight 0 times stale cache contents could be NaN.
class Bf16Tiles {
 public:
  static constexpr int kStages = 4, kAhead = 2;
  using Shared = TileMemory<kStages>;

  __device__ Bf16Tiles(const Context& c, Shared& s) : c_(c) {
    page_ = page_of(0);
    for (int tile = 0; tile < kAhead; ++tile) start(tile, s);
  }
  __device__ void advance(int tile, Shared& s) {
    start(tile + kAhead, s);
    cp_async_wait<kAhead>();
  }

 private:
  __device__ void start(int tile, Shared& s) {
    const int first = c_.begin + tile * kTile, dim = c_.cache->kv_rank + c_.cache->rope_dim;
    if (first < c_.end) {
      const auto* rows = static_cast<const bf16*>(c_.cache->data) +
                         (page_ * kPageTokens + first % kPageTokens) * c_.cache->stride;
      page_ = page_of(tile + 1);  // long before it is needed
      constexpr int kChunks = kMaxCacheDim / 8;
      for (int i = threadIdx.x; i < kTile * kChunks; i += kThreads) {
        const int row = i / kChunks, column = i % kChunks * 8;
        copy_8(&s.kv[tile % kStages][row][column], rows + row * c_.cache->stride + column,
               first + row < c_.end ? dim - column : 0);
      }
    }
    cp_async_commit();
  }
  __device__ int64_t page_of(int tile) const {
    const int token = c_.begin + tile * kTile;
    return token < c_.end ? c_.pages[token / kPageTokens] : 0;
  }

  Context c_;
  int64_t page_;
};

// Each thread decodes what it copied; scales stay in registers.
class Fp8Tiles {
 public:
  static constexpr int kStages = 2;
  static constexpr int kLatentChunks = kMaxKvRank / 16, kRopeChunks = 8;
  static constexpr int kChunks = kLatentChunks + kRopeChunks;
  static constexpr int kLoads = (kTile * kChunks + kThreads - 1) / kThreads;
  struct Shared : TileMemory<kStages> {
    uint4 raw[kTile * kChunks];
  };

  __device__ Fp8Tiles(const Context& c, Shared& s) : c_(c) {
    page_ = page_of(0);
    start(0, s);
  }
  __device__ void advance(int tile, Shared& s) {
    cp_async_wait<0>();
    decode(tile, s);
    start(tile + 1, s);
  }

 private:
  __device__ void start(int tile, Shared& s) {
    const int first = c_.begin + tile * kTile;
    if (first < c_.end) {
      const auto* rows = static_cast<const uint8_t*>(c_.cache->data) +
                         (page_ * kPageTokens + first % kPageTokens) * kFp8TokenBytes;
      page_ = page_of(tile + 1);
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        const int i = load * kThreads + threadIdx.x, row = i / kChunks, chunk = i % kChunks;
        if (i >= kTile * kChunks) break;
        const bool valid = first + row < c_.end, latent = chunk < kLatentChunks;
        const uint8_t* from = rows + row * kFp8TokenBytes;
        cp_async_16(&s.raw[i], from + (latent ? chunk : chunk + 1) * 16, valid);
        scale_[load] =
            valid && latent ? reinterpret_cast<const float*>(from + kMaxKvRank)[chunk / 8] : 0;
      }
    }
    cp_async_commit();
  }

  __device__ void decode(int tile, Shared& s) {
    if (c_.begin + tile * kTile >= c_.end) return;
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      const int i = load * kThreads + threadIdx.x, row = i / kChunks, chunk = i % kChunks;
      if (i >= kTile * kChunks) break;
      const uint4 raw = s.raw[i];
      bf16* const to = s.kv[tile % kStages][row];
      if (chunk < kLatentChunks) {
        auto* const latent = reinterpret_cast<uint4*>(to + chunk * 16);
        const float scale = scale_[load];
        latent[0] = decoded(raw.x, raw.y, scale);
        latent[1] = decoded(raw.z, raw.w, scale);
      } else {
        *reinterpret_cast<uint4*>(to + kMaxKvRank + (chunk - kLatentChunks) * 8) = raw;
      }
    }
  }

  __device__ static uint4 decoded(uint32_t first, uint32_t second, float scale) {
    uint4 v;
    widen_e4m3(first, v.x, v.y);
    widen_e4m3(second, v.z, v.w);
    for (uint32_t* pair : {&v.x, &v.y, &v.z, &v.w})
      *pair = pack_bf16(bf16_low(*pair) * scale, bf16_high(*pair) * scale);
    return v;
  }
  __device__ int64_t page_of(int tile) const {
    const int token = c_.begin + tile * kTile;
    return token < c_.end ? c_.pages[token / kPageTokens] : 0;
  }

  Context c_;
  int64_t page_;
  float scale_[kLoads];
};

}  // namespace tandem::gpu::mla
