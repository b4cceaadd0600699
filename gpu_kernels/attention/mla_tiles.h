// Loads tiles of 16 tokens of the latent cache into shared memory for mla_decode.cu, as BF16 or
// decoded from FP8.
//
// Both kinds have the same interface, for a loop of two phases between barriers. begin() returns
// when all threads see tile 0 and have prepare(0) yet to call. In the phase without tensor cores,
// fetch(t) starts copies and waits for earlier ones; in the other, prepare(t) decodes what arrived.
// After both and a barrier all threads see tile t. Tiles beyond the context may be requested and
// are not copied. Rows beyond it become zeros: weight 0 times stale cache contents could be NaN.
#pragma once
#include "device.h"
#include "gpu_kernels/attention/attention.h"
#include "gpu_kernels/attention/softmax.h"
#include "gpu_kernels/e4m3.h"

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

class Bf16Tiles {
 public:
  static constexpr int kStages = 4, kAhead = 2;
  using Shared = TileMemory<kStages>;

  __device__ Bf16Tiles(const Context& c, Shared& s) : c_(c) {
    page_ = page_of(0);
    for (int tile = 0; tile < kAhead; ++tile) start(tile, s);
  }
  __device__ void begin(Shared& s) {
    fetch(0, s);
    __syncthreads();
  }
  __device__ void fetch(int tile, Shared& s) {
    start(tile + kAhead, s);
    cp_async_wait<kAhead>();
  }
  __device__ void prepare(int, Shared&) {}

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

// Latents and scales are copied to `raw` and decoded a tile before they are used. Keys need no
// decoding: they are copied to their place, where the key of three tiles before was read last by
// the scores of the previous phase.
class Fp8Tiles {
 public:
  static constexpr int kStages = 3, kRawStages = 2;
  static constexpr int kRowThreads = kThreads / kTile;                // that copy a token
  static constexpr int kKeyChunks = (kMaxCacheDim - kMaxKvRank) / 8;  // of 16 bytes
  struct Shared : TileMemory<kStages> {
    struct Raw {
      alignas(16) uint8_t codes[kMaxKvRank];
      float scales[4];
    } raw[kRawStages][kTile];
  };
  static_assert(sizeof(Shared) <= 99 * 1024 && 2 * 16 * kRowThreads == kMaxKvRank);

  __device__ Fp8Tiles(const Context& c, Shared& s) : c_(c) {
    page_ = page_of(0);
    start(0, s);
    start(1, s);
  }
  __device__ void begin(Shared& s) {
    cp_async_wait<0>();
    __syncthreads();
    decode(0, s);
    __syncthreads();
    start(2, s);
  }
  __device__ void fetch(int tile, Shared& s) {
    start(tile + 2, s);
    cp_async_wait<1>();
  }
  __device__ void prepare(int tile, Shared& s) { decode(tile + 1, s); }

 private:
  __device__ void start(int tile, Shared& s) {
    const int first = c_.begin + tile * kTile;
    if (first < c_.end) {
      const auto* rows = static_cast<const uint8_t*>(c_.cache->data) +
                         (page_ * kPageTokens + first % kPageTokens) * kFp8TokenBytes;
      page_ = page_of(tile + 1);
      const int row = threadIdx.x / kRowThreads, part = threadIdx.x % kRowThreads;
      const uint8_t* from = rows + row * kFp8TokenBytes + part * 16;
      const bool valid = first + row < c_.end;
      typename Shared::Raw& raw = s.raw[tile % kRawStages][row];
      for (int half = 0; half < 2; ++half)
        cp_async_16(&raw.codes[half * kMaxKvRank / 2 + part * 16], from + half * kMaxKvRank / 2,
                    valid);
      bf16* const key = &s.kv[tile % kStages][row][kMaxKvRank];
      if (part <= kKeyChunks)
        cp_async_16(part == 0 ? static_cast<void*>(raw.scales) : key + (part - 1) * 8,
                    from + kMaxKvRank, valid);
    }
    cp_async_commit();
  }

  // A thread decodes 8 codes at a time, so that neither loads nor stores have bank conflicts.
  __device__ void decode(int tile, Shared& s) {
    if (c_.begin + tile * kTile >= c_.end) return;
    constexpr int kPieces = kMaxKvRank / 8;
    const int piece = threadIdx.x % kPieces;
#pragma unroll
    for (int first = 0; first < kTile; first += kThreads / kPieces) {
      const int row = first + threadIdx.x / kPieces;
      const typename Shared::Raw& raw = s.raw[tile % kRawStages][row];
      const uint2 codes = *reinterpret_cast<const uint2*>(&raw.codes[piece * 8]);
      *reinterpret_cast<uint4*>(&s.kv[tile % kStages][row][piece * 8]) =
          decoded(codes, raw.scales[piece / 16]);
    }
  }

  __device__ static uint4 decoded(uint2 codes, float scale) {
    uint4 v;
    widen_e4m3(codes.x, v.x, v.y);
    widen_e4m3(codes.y, v.z, v.w);
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
};

}  // namespace tandem::gpu::mla
