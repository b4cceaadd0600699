// AMX tile configuration shared by all products here.
#pragma once
#include <immintrin.h>

#include "cpu_kernels/kernels.h"

namespace tandem::cpu {
namespace {

constexpr int kTileRows = 16, kTileBytes = 1024;

// The compiler knows when tiles are loaded and stored, but not which memory that reads and writes.
void order_memory() { asm volatile("" ::: "memory"); }

// Tiles 0 to 3 are accumulators, 4 and 5 hold rows (A), 6 and 7 columns (B). All have 16 rows of 64
// bytes: configuring fewer rows would save cycles only with few rows of x, where reading the
// weights is the limit anyway. Tiles are configured once per call and released at its end: that
// costs less than a hundredth of the smallest product, leaves no state in threads, and spares an
// idle or switching core from saving 8 KiB.
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
