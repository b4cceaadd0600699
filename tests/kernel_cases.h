// Matrices and activations in the layouts of the kernels, for tests.
#pragma once
#include <bit>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cpu_kernels/kernels.h"
#include "tests/random_model.h"
#include "tests/stored_numbers.h"

namespace tandem::test {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Shape {
  int m, n, k;
};

inline std::vector<float> normal(std::mt19937& rng, size_t n, float deviation = 1) {
  std::normal_distribution<float> d(0, deviation);
  std::vector<float> v(n);
  for (float& x : v) x = d(rng);
  return v;
}

inline ModelConfig with_block(int block) {
  ModelConfig c;
  c.n_layers = c.vocab = c.dim = 0;
  c.scale_block = block;
  return c;
}

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3};

// With small scale blocks BF16 has scales too. No checkpoint has that, but kernels.h allows it, and
// such blocks begin in the middle of a tile.
inline QuantView random_weight(RandomModel& m, int n, int k, DType dtype) {
  if (dtype == DType::kBF16 && m.config.scale_block < 32) {
    QuantView w = m.matrix(n, k, DType::kF8E4M3);
    w.q = m.floats(n, k, 0, 100, dtype);
    return w;
  }
  if (dtype != DType::kF16) return m.matrix(n, k, dtype);
  QuantView w{.q = m.room(n, k, dtype), .scale = {}};
  for (int64_t i = 0; i < int64_t{n} * k; ++i) {  // any half except infinities and NaN
    uint16_t half = static_cast<uint16_t>(m.rng());
    if ((half >> 10 & 31) == 31) half &= 0x83ff;
    std::memcpy(w.q.row_data(0) + 2 * i, &half, 2);
  }
  return w;
}

// The columns of w from `first` on, copied, with all scales of w; `first` may lie within a block.
inline QuantView columns_from(RandomModel& m, const QuantView& w, int64_t first) {
  QuantView part = w;
  const int64_t cols = w.q.cols - first, size = size_of(w.q.dtype);
  part.q = m.room(w.q.rows, cols, w.q.dtype);
  for (int64_t r = 0; r < w.q.rows; ++r)
    std::memcpy(part.q.row_data(r), w.q.row_data(r) + first * size, cols * size);
  part.col0 += static_cast<int>(first);
  return part;
}

// A matrix packed in a table's layout, in two parts.
struct Packed {
  CpuWeights home;
  QuantView w;

  Packed(const cpu::KernelTable& t, const QuantView& stored) : home(t) {
    home.allocate(home.packed_bytes(stored));
    w = home.reserve(stored);
    const int64_t half = std::min<int64_t>(16, stored.q.rows);
    home.pack(stored.q.row_data(0), w, 0, half);
    if (half < stored.q.rows) home.pack(stored.q.row_data(half), w, half, stored.q.rows - half);
    if (!stored.scale.empty()) CpuWeights::pack_scales(stored.scale.data, w);
  }
};

// Rows encoded as a table multiplies them, and their values after rounding.
struct Rows {
  std::vector<float> values, scales;
  Buffer room;
  cpu::Activations view;

  Rows(const cpu::KernelTable& t, cpu::ActivationType type, std::vector<float> x, int n, int stride,
       int k)
      : values(std::move(x)), scales(n) {
    view = {values.data(), int64_t{stride} * 4, type, nullptr, scales.data()};
    if (type == cpu::ActivationType::kF32) return;
    const int64_t row_bytes = cpu::encoded_columns(k) * 2 + 64;
    room = Buffer(n * row_bytes);
    std::memset(room.data(), 0xff, room.bytes());  // NaN
    for (int i = 0; i < n; ++i) {
      std::byte* const row = room.data() + i * row_bytes;
      t.encode({values.data() + i * stride, k, type, row, &scales[i]});
      for (int c = 0; c < k; ++c) {
        float& v = values[i * stride + c];
        v = type == cpu::ActivationType::kU8 ? scales[i] * (static_cast<int>(row[c]) - 128)
                                             : std::bit_cast<float>(uint32_t{to_bf16(v)} << 16);
      }
    }
    view.data = room.data();
    view.stride = row_bytes;
  }
};

inline std::vector<cpu::ActivationType> activations(const cpu::KernelTable& t, DType dtype) {
  const auto own = activation_for(t, dtype);
  if (own == cpu::ActivationType::kF32) return {own};
  return {cpu::ActivationType::kF32, own};
}

}  // namespace tandem::test
