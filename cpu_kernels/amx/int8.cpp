// AMX products of bytes: INT8 weights are used as stored, INT4 is widened block by block. Sums of a
// block of columns are exact integers, so results are bit-identical to the vector kernel.
#include "cpu_kernels/amx/tiles.h"
#include "cpu_kernels/avx512/i4.h"

namespace tandem::cpu {

void avx512_gemm_int8(const GemmArgs&);

namespace {

// Up to this many rows are multiplied by vectors: a tile of w costs the same for one row as for
// several.
constexpr int kVectorRows = 2;

void gemm_by_tiles(const GemmArgs& a) {
  configure_tiles_for(a.m);
  Room<ByteProduct> room;
  const int per_step = columns_of_step(a.w.type);
  const Order order = {.part = ByteProduct::kColumns,
                       .ahead = bytes_ahead(a.m, ByteProduct::kColumns / per_step * kStepBytes)};
  multiply(a, order, [&](const Block& b, int first, int m, Sum* sums) {
    if (a.w.type == WeightType::kI8) {
      add_tiles(a, b, first, m, sums, room, StoredTiles(b, per_step, room));
    } else {
      // The group's multipliers are read at its first step and at that of every tile.
      const int group = b.group / per_step, shift = __builtin_ctz(group);
      const int each = min(group, kStepsMultiple / 2);
      Multipliers of_group;
      add_tiles(
          a, b, first, m, sums, room,
          WidenedTiles(
              b, per_step, room, [&](int panel, int s, __m512i step, __m512i* low, __m512i* high) {
                if ((s & (each - 1)) == 0)
                  of_group = multipliers_of(b.multipliers[panel] + (s >> shift) * kMultipliers);
                widen_i4(step, of_group, low, high);
              }));
    }
  });
  _tile_release();
}

}  // namespace

// INT4 with BF16 scales adds its results to the sums after every 32 columns or so, which takes
// tiles twice the time of vectors.
void amx_gemm_int8(const GemmArgs& a) {
  const bool by_vectors = a.w.type == WeightType::kI4 || (a.m <= kVectorRows && !a.x.tiled);
  by_vectors ? avx512_gemm_int8(a) : gemm_by_tiles(a);
}

}  // namespace tandem::cpu
