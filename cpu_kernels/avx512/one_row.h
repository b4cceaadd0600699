// Products of one row of x with whole groups of panels, which are read from memory once. The code
// has few instructions per cache line, and little between groups, where nothing is read. Sums are
// bit-identical to multiply().
#pragma once
#include "cpu_kernels/avx512/panels.h"

namespace tandem::cpu {
namespace {

enum class ScalesOf { kNothing, kPanels, kRows, kGroups, kTwoLevels };
static_assert(kGroup == kScalePanels);

// Parameters of a weight format for multiply_one_row():
//   kType, kScales  the weight type and the layout of its scales
//   kColumns        columns of a part at most; scales do not change within a part. kTwoLevels: a
//                   part is a group, and sums span kColumns
//   kXBytes         bytes of x that a step takes
//   kUnit           unit of the sums
//   kAhead          prefetch distance in bytes of a panel: the parts of its last kAhead bytes, at
//                   least the last part, fetch the beginning of the next group; what is then left
//                   of the last part is fetched by the hardware
//   kLevel          the cache that weights are fetched into, 1 or 2
//   Vector          sums of 16 rows in a part; floats() of it is added to the row's sums
//   kTileBytes      bytes of a panel after which end_tile(sums) is called; 0: never
//   add(x, w, stride, sums)  adds a step of four panels
// What most of them have:
struct RowFormat {
  static constexpr int kTileBytes = 0, kAhead = kNearAhead, kLevel = 2;
  static constexpr float kUnit = 1;
};

constexpr int kScaleLines = 4;  // cache lines per panel and part that fetches the next group
constexpr int kGroupScales = kScalePanels * kPanelRows / 2;  // per block, BF16 in floats
constexpr int kGroupScalesAhead = 8 * kGroupScales;

// Columns of multiply()'s parts; 0 if the scales have another layout.
template <class Format>
int part_of(const GemmArgs& a) {
  const Weight& w = a.w;
  if ((w.type == WeightType::kI4TwoLevel) != (Format::kScales == ScalesOf::kTwoLevels)) return 0;
  if ((w.scales == nullptr) != (Format::kScales == ScalesOf::kNothing)) return 0;
  if (!w.scales) return Format::kColumns;
  const bool of_rows = w.block_rows == 1;
  if (w.col0 != 0 || of_rows != (Format::kScales >= ScalesOf::kRows)) return 0;
  if (!of_rows && (w.block_rows % kPanelRows != 0 || w.row0 % kPanelRows != 0)) return 0;
  if (w.block_cols >= a.k && Format::kScales < ScalesOf::kGroups) return Format::kColumns;
  const bool fits =
      w.block_cols <= Format::kColumns && w.block_cols % columns_of_step(Format::kType) == 0;
  return fits ? w.block_cols : 0;
}

// The scales of the first part.
template <ScalesOf kScales>
const float* scales_of(const Weight& w, int64_t panel) {
  if (kScales == ScalesOf::kNothing || !w.scales) return nullptr;
  if (kScales == ScalesOf::kTwoLevels)  // their bytes fill whole floats
    return reinterpret_cast<const float*>(two_level_multipliers(w, panel));
  if (kScales == ScalesOf::kGroups)
    return w.scales + panel / kScalePanels * w.scale_stride +
           panel % kScalePanels * kGroupScales / kScalePanels;
  return w.scales +
         (kScales == ScalesOf::kRows ? panel : (w.row0 + panel * kPanelRows) / w.block_rows) *
             w.scale_stride;
}

template <ScalesOf kScales>
__m512 read_scales(const float* from) {
  if constexpr (kScales == ScalesOf::kNothing) return _mm512_set1_ps(1);
  if constexpr (kScales == ScalesOf::kGroups) return floats(reinterpret_cast<const bf16*>(from));
  return kScales == ScalesOf::kPanels ? _mm512_set1_ps(*from) : _mm512_loadu_ps(from);
}

template <ScalesOf kScales>
void fetch_scales(const float* from, int64_t stride) {
  if (!from) return;
  for (int p = 0; p < (kScales == ScalesOf::kRows ? kGroup : 1); ++p)
    fetch_weights(from + p * stride, kScaleLines * 64);
}

// Adds a group's sums times the rows' multipliers.
[[maybe_unused]] void add_multiples(const Integers* sums, const float* const* multipliers,
                                    Integers* to) {
#pragma GCC unroll 4
  for (int p = 0; p < kGroup; ++p) {
    const __m512i m =
        _mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(multipliers[p])));
    to[p] += (Integers)_mm512_mullo_epi32((__m512i)sums[p], m);
  }
}

// Adds n_bytes of steps of four panels and fetches as many bytes at `ahead`.
template <class Format>
[[gnu::always_inline]] inline void add_steps(const Format& format, const char* x, const char* w,
                                             const char* ahead, int64_t stride, int64_t n_bytes,
                                             typename Format::Vector* sums) {
  for (const char* const end = w + n_bytes; w < end;) {
    const bool in_tiles = Format::kTileBytes > 0 && end - w > Format::kTileBytes;
    for (const char* const stop = in_tiles ? w + Format::kTileBytes : end; w < stop;
         w += kStepBytes, x += Format::kXBytes) {
#pragma GCC unroll 4
      for (int p = 0; p < kGroup; ++p)
        __builtin_prefetch(ahead + p * stride, 0, Format::kLevel == 1 ? 3 : 2);
      ahead += kStepBytes;
      format.add(x, w, stride, sums);
    }
    if constexpr (Format::kTileBytes > 0) format.end_tile(sums);
  }
}

// Stores the sums of a group of panels like store().
template <class Format>
[[gnu::always_inline]] inline void store_row(const GemmArgs& a, int64_t panel, const __m512* sums) {
  float* const out = a.out + (panel * kPanelRows - a.first_row);
#pragma GCC unroll 4
  for (int p = 0; p < kGroup; ++p) {
    __m512 sum = _mm512_mul_ps(sums[p], _mm512_set1_ps(Format::kUnit));
    if constexpr (Format::kScales >= ScalesOf::kRows) {
      const float* const offset = sums_of_rows(a.w, panel + p);
      const __m512 scale = _mm512_set1_ps(a.x.scales[a.x.rows ? a.x.rows[0] : 0]);
      sum = _mm512_mul_ps(_mm512_sub_ps(sum, _mm512_loadu_ps(offset)), scale);
    }
    _mm512_storeu_ps(out + p * kPanelRows, sum);
  }
}

// Returns false, without effect, unless x is one row, w has whole groups, and all parts are equally
// wide. Not inlined: the large frames of callers would cost it registers.
template <class Format>
[[gnu::noinline]] bool multiply_one_row(const GemmArgs& a) {
  constexpr ScalesOf kScales = Format::kScales;
  constexpr int kColumnsOfStep = columns_of_step(Format::kType);
  if (a.m != 1 || a.first_row % kPanelRows != 0 || a.n % kGroupRows != 0) return false;
  const int part = part_of<Format>(a);
  if (part == 0) return false;

  const Format format;
  const int64_t stride = a.w.stride, scale_stride = a.w.scale_stride;
  const int64_t part_bytes = part / kColumnsOfStep * kStepBytes;
  const int64_t n_bytes = int64_t{a.k + kColumnsOfStep - 1} / kColumnsOfStep * kStepBytes;
  const int scale_step = kScales == ScalesOf::kNothing || a.w.block_cols >= a.k ? 0
                         : kScales == ScalesOf::kRows                           ? kPanelRows
                         : kScales == ScalesOf::kGroups                         ? kGroupScales
                         : kScales == ScalesOf::kTwoLevels ? kMultipliers / sizeof(float)
                                                           : 1;
  const int64_t first = a.first_row / kPanelRows, last = first + a.n / kPanelRows;
  for (int64_t panel = first; panel < last; panel += kGroup) {
    PanelPlace next = {&a.w, panel + kGroup};
    if (next.panel >= last && a.next) next = {a.next, a.next_row / kPanelRows};
    const char* next_w = next.data();
    const float* next_scale = scales_of<kScales>(*next.w, next.panel);
    const char* x = x_row(a.x, 0);
    const char* w = PanelPlace{&a.w, panel}.data();
    const float* scale[kGroup];
    __m512 sums[kGroup];
#pragma GCC unroll 4
    for (int p = 0; p < kGroup; ++p) {
      scale[p] = scales_of<kScales>(a.w, panel + p);
      sums[p] = _mm512_setzero_ps();
    }
    typename Format::Vector block_sums[1][kGroup];  // for kTwoLevels
    int block_left = Format::kColumns;
    if constexpr (kScales == ScalesOf::kTwoLevels) {
      clear(block_sums);
      for (int p = 0; p < kGroup; ++p) __builtin_prefetch(two_level_scales(a.w, panel + p));
    }
    for (int64_t left = n_bytes; left > 0;) {
      const int64_t n = part_bytes < left ? part_bytes : left;
      left -= n;
      typename Format::Vector part_sums[1][kGroup];
      clear(part_sums);
      if (left >= Format::kAhead) {
        if (kScales == ScalesOf::kRows && scale_step > 0)
          for (const float* from : scale) __builtin_prefetch(from + kScalesAhead * kPanelRows);
        if (kScales == ScalesOf::kGroups)
          fetch_weights(scale[0] + kGroupScalesAhead, kGroupScales * sizeof(float));
        if (kScales == ScalesOf::kTwoLevels)
          __builtin_prefetch(scale[0] + kScalesAhead * scale_step);
        add_steps(format, x, w, w + Format::kAhead, stride, n, part_sums[0]);
      } else {
        fetch_scales<kScales>(next_scale, scale_stride);
        add_steps(format, x, w, next_w, stride, n, part_sums[0]);
        if (next_scale) next_scale += kScaleLines * kPanelRows;
        next_w += n;
      }
      w += n;
      x += n / kStepBytes * Format::kXBytes;
      if constexpr (kScales == ScalesOf::kTwoLevels) {
        add_multiples(part_sums[0], scale, block_sums[0]);
        for (const float*& from : scale) from += scale_step;
        block_left -= part;
        if (block_left > 0 && left > 0) continue;
#pragma GCC unroll 4
        for (int p = 0; p < kGroup; ++p)
          sums[p] = _mm512_fmadd_ps(floats(block_sums[0][p]),
                                    _mm512_loadu_ps(two_level_scales(a.w, panel + p)), sums[p]);
        clear(block_sums);
        block_left = Format::kColumns;
      } else {
#pragma GCC unroll 4
        for (int p = 0; p < kGroup; ++p) {
          sums[p] =
              _mm512_fmadd_ps(floats(part_sums[0][p]), read_scales<kScales>(scale[p]), sums[p]);
          scale[p] += scale_step;
        }
      }
    }
    store_row<Format>(a, panel, sums);
  }
  return true;
}

}  // namespace
}  // namespace tandem::cpu
