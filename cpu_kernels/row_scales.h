// Location of row scales of byte and INT4 weights (kernels.h, Weight).
#pragma once
#include <cstdint>

#include "cpu_kernels/kernels.h"

namespace tandem::cpu {
namespace {

// 128 times the sum of each row's values, [16], for products with kU8 activations.
const float* sums_of_rows(const Weight& w, int64_t panel) {
  if (!is_i4(w.type)) return w.scales + (panel + 1) * w.scale_stride - kPanelRows;
  return w.scales + (panel / kScalePanels + 1) * w.scale_stride -
         (kScalePanels - panel % kScalePanels) * kPanelRows;
}

// kI4TwoLevel: the rows' own scales, [16]; below, the multipliers of the first group.
const float* two_level_scales(const Weight& w, int64_t panel) {
  return sums_of_rows(w, panel) - kScalePanels * kPanelRows;
}
constexpr int kMultipliers = kScalePanels * kPanelRows;  // per group of columns
const int8_t* two_level_multipliers(const Weight& w, int64_t panel) {
  return reinterpret_cast<const int8_t*>(w.scales + panel / kScalePanels * w.scale_stride) +
         panel % kScalePanels * kPanelRows;
}

}  // namespace
}  // namespace tandem::cpu
