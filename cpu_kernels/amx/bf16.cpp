// AMX products of BF16 activations with BF16 and FP8 weights. FP8 is widened exactly, block by
// block, in the level-1 cache.
#include "cpu_kernels/amx/e4m3.h"
#include "cpu_kernels/amx/one_row.h"
#include "cpu_kernels/amx/tiles.h"

namespace tandem::cpu {

void avx512_gemm(const GemmArgs&);
void amx_gemm_int8(const GemmArgs&);

namespace {

static_assert(kPartColumns == Bf16Product::kColumns);

void gemm_by_tiles(const GemmArgs& a) {
  configure_tiles_for(a.m);
  Room<Bf16Product> room;
  const E4m3Table table;
  const int per_step = columns_of_step(a.w.type);
  const Order order = {.part = Bf16Product::kColumns,
                       .ahead = bytes_ahead(a.m, Bf16Product::kColumns / per_step * kStepBytes)};
  multiply(a, order, [&](const Block& b, int first, int m, Sum* sums) {
    if (a.w.type == WeightType::kBF16) {
      add_tiles(a, b, first, m, sums, room, StoredTiles(b, per_step, room));
    } else {
      add_tiles(
          a, b, first, m, sums, room,
          WidenedTiles(b, per_step, room, [&](int, int, __m512i step, __m512i* w0, __m512i* w1) {
            widen_e4m3_step(table, step, w0, w1);
          }));
    }
  });
  _tile_release();
}

void gemm(const GemmArgs& a) {
  if (a.x.type == ActivationType::kF32) return avx512_gemm(a);
  if (a.x.type == ActivationType::kU8) return amx_gemm_int8(a);
  a.m == 1 && !a.x.tiled ? gemm_one_row(a) : gemm_by_tiles(a);
}

void tile(const TileArgs& a) {
  const int element_bytes = a.x.type == ActivationType::kU8 ? 1 : sizeof(bf16);
  const int64_t n_bytes = encoded_columns(a.k) * element_bytes;
  for (int r = 0; r < a.n; ++r) {
    const char* const from = x_row(a.x, a.first + r);
    char* to = static_cast<char*>(a.to) + r * kStepBytes;
    for (int64_t i = 0; i < n_bytes; i += kStepBytes, to += a.n * kStepBytes)
      _mm512_store_si512(to, _mm512_loadu_si512(from + i));
  }
}

// Blocks of columns must begin where tiles do. INT4 with BF16 scales is multiplied by vectors.
bool takes_tiles(const Weight& w) {
  if (w.type == WeightType::kI4TwoLevel) return true;
  if (w.type != WeightType::kBF16 && w.type != WeightType::kF8E4M3 && w.type != WeightType::kI8)
    return false;
  constexpr int kMultiple = Bf16Product::kColumns;
  return !w.scales || (w.block_cols % kMultiple == 0 && w.col0 % kMultiple == 0);
}

}  // namespace

// The other AVX-512 kernels with BF16 stay installed.
void install_amx(KernelTable& t) {
  t.gemm = gemm;
  t.tile = tile;
  t.takes_tiles = takes_tiles;
}

}  // namespace tandem::cpu
