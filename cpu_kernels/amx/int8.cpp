// AMX products of bytes: INT8 weights are used as stored, INT4 is widened block by block. Sums of a
// block of columns are exact integers, so results are bit-identical to the vector kernel.
#include "cpu_kernels/amx/tiles.h"
#include "cpu_kernels/avx512/i4.h"

namespace tandem::cpu {

void avx512_gemm_int8(const GemmArgs&);

namespace {

void gemm_by_tiles(const GemmArgs& a) {
  configure_tiles();
  Room<ByteProduct> room;
  const int per_step = columns_of_step(a.w.type);
  const float unit = a.w.type == WeightType::kI4 ? 1 / 16.f : 1;
  const Order order = {
      .part = ByteProduct::kColumns, .ahead = Room<ByteProduct>::kBytes, .unit = unit};
  multiply(a, order, [&](Block b, int first, int m, Sum* sums) {
    if (a.w.type == WeightType::kI8) {
      tiles_in_place(b, per_step, room);
    } else if (a.w.type == WeightType::kI4) {
      widen_tiles(b, per_step, room, [](int, int, __m512i step, __m512i* low, __m512i* high) {
        widen_i4(step, low, high);
      });
    } else {
      const int group = b.group / per_step, shift = __builtin_ctz(group);
      Multipliers of_group;
      widen_tiles(b, per_step, room,
                  [&](int panel, int s, __m512i step, __m512i* low, __m512i* high) {
                    if ((s & (group - 1)) == 0)
                      of_group = multipliers_of(b.multipliers[panel] + (s >> shift) * kMultipliers);
                    widen_i4(step, of_group, low, high);
                  });
    }
    add_tiles<ByteProduct>(a, b, first, m, sums, room);
  });
  _tile_release();
}

}  // namespace

void amx_gemm_int8(const GemmArgs& a) { a.m > kFewRows ? gemm_by_tiles(a) : avx512_gemm_int8(a); }

}  // namespace tandem::cpu
