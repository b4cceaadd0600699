// AMX tile configuration shared by all products here.
#pragma once
#include <immintrin.h>

#include "cpu_kernels/kernels.h"

namespace tandem::cpu {
namespace {

constexpr int kTileRows = 16, kTileBytes = 1024;

// The compiler knows when tiles are loaded and stored, but not which memory that reads and writes.
void order_memory() { asm volatile("" ::: "memory"); }

// Tiles 0 to 3 are accumulators, 4 and 5 hold rows of x, 6 and 7 columns of w. All have 16 rows of
// 64 bytes: configuring fewer rows would save cycles only where the weights' bandwidth is not the
// limit. Tiles are configured once per call and released at its end: that costs less than a
// hundredth of the smallest product, leaves no state in threads, and saves an idle or switching
// core from saving 8 KiB.
void configure_tiles() {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  order_memory();
  _tile_loadconfig(&config);
}

}  // namespace
}  // namespace tandem::cpu
