// AMX tile configuration shared by all products here.
#pragma once
#include <immintrin.h>

#include "cpu_kernels/kernels.h"

namespace tandem::cpu {
namespace {

// The compiler knows when tiles are loaded and stored, but not which memory that reads and writes.
void order_memory() { asm volatile("" ::: "memory"); }

// Tiles 0 to 3 are accumulators, 4 and 5 hold rows of x (A), 6 and 7 rows of w (B), of 64 bytes
// each. Loading tiles of x and storing results takes time by the row, so tiles of fewer than 16
// rows of x are configured to have no more: `rows` in tiles 0, 1 and 4, `more_rows` in 2, 3 and 5.
// Tiles are configured once per call and released at its end: that costs less than a hundredth of
// the smallest product, leaves no state in threads, and spares an idle or switching core from
// saving 8 KiB.
void configure_tiles(int rows = kTileRows, int more_rows = kTileRows) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  config.rows[0] = config.rows[1] = config.rows[4] = static_cast<uint8_t>(rows);
  config.rows[2] = config.rows[3] = config.rows[5] = static_cast<uint8_t>(more_rows);
  order_memory();
  _tile_loadconfig(&config);
}

}  // namespace
}  // namespace tandem::cpu
