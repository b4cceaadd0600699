// The tiles of AMX as every product here uses them.
#pragma once
#include <immintrin.h>

#include "cpu_kernels/kernels.h"

namespace tandem::cpu {
namespace {

constexpr int kTileRows = 16, kTileBytes = 1024;

// The compiler sees that tiles are loaded and stored, but not what they read and write.
void order_memory() { asm volatile("" ::: "memory"); }

// Tiles 0 to 3 are sums of rows times columns, 4 and 5 hold rows, 6 and 7 columns. All have 16 rows
// of 64 bytes: fewer rows of x would save cycles only where the weights' bytes are what costs.
// Configured once a call, and released at its end: that costs less than a hundredth of the smallest
// product, leaves no state in threads, and lets a core that sleeps or switches save 8 KiB less.
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
