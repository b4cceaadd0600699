// AMX peaks: four accumulators hide a tile product's latency (52 cycles at one product per 16).
#include <immintrin.h>

#include "cpu_kernels/peaks.h"

namespace tandem::cpu {
namespace {

constexpr int kTileRows = 16, kTileBytes = 64, kTiles = 8;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Operands are not zero: products with zero use less power, which would raise the clock.
void set_up_tiles() {
  alignas(64) uint8_t numbers[kTileRows * kTileBytes];
  for (uint8_t& n : numbers) n = 0x3f;
  TileConfig config;
  for (int t = 0; t < kTiles; ++t) {
    config.row_bytes[t] = kTileBytes;
    config.rows[t] = kTileRows;
  }
  // GCC 12 assumes that the instruction reads only 8 of the 64 bytes.
  __asm__ volatile("" : : "r"(&config), "r"(&numbers) : "memory");
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, numbers, kTileBytes);
  _tile_loadd(5, numbers, kTileBytes);
}

void dot_int8(int64_t n_rounds) {
  set_up_tiles();
  for (int64_t round = 0; round < n_rounds; ++round) {
    _tile_dpbusd(0, 4, 5);
    _tile_dpbusd(1, 4, 5);
    _tile_dpbusd(2, 4, 5);
    _tile_dpbusd(3, 4, 5);
  }
  _tile_release();
}

void dot_bf16(int64_t n_rounds) {
  set_up_tiles();
  for (int64_t round = 0; round < n_rounds; ++round) {
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 5);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_release();
}

constexpr int64_t kOutputs = 4 * kTileRows * 16;  // per round
constexpr PeakLoop kPeaks[] = {
    {"tdpbf16ps", Arithmetic::kBF16, Feature::kAmxBf16, kOutputs * 32 * 2, dot_bf16},
    {"tdpbusd", Arithmetic::kInt8, Feature::kAmxInt8, kOutputs * 64 * 2, dot_int8},
};

}  // namespace

SpeedLoops amx_speed_loops() { return {kPeaks, sizeof(kPeaks) / sizeof(PeakLoop), nullptr, 0}; }

}  // namespace tandem::cpu
