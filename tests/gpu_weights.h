// Random weights on the GPU in the layout of products.h, and their decoded values.
#pragma once
#include <cmath>
#include <cstring>
#include <memory>

#include "gpu_kernels/products/products.h"
#include "tests/gpu_buffers.h"

namespace tandem::gpu::test {

constexpr Number kFp8 = Number::kF8E4M3, kBf16 = Number::kBF16, kFloat = Number::kF32;

struct WeightCase {
  int rows, cols;
  Number type;
  int row0 = 0;  // the first row's position in its block of scales
  int block = 128;
  float scale = 1;        // magnitude of the scales
  int n_experts = 1;      // stored one after another
  bool integers = false;  // numbers from -4 to 4, whose products with integers have exact sums
};

// All codes but NaN, subnormals included; scales of both signs; NaN in everything that must not be
// read.
class RandomWeight {
 public:
  RandomWeight(Stream& stream, std::mt19937& rng, const WeightCase& c) : c_(c) {
    const int64_t unit = 16 / bytes_of(c.type);
    stride_ = (c.cols + unit - 1) / unit * unit + unit;
    scale_stride_ = (c.cols + c.block - 1) / c.block + 1;
    scale_rows_ = (c.row0 + c.rows + c.block - 1) / c.block;
    bytes_.assign(expert_bytes() * c.n_experts, 0xff);
    scales_.assign(scale_rows_ * scale_stride_ * c.n_experts, NAN);
    values_.resize(int64_t{c.n_experts} * c.rows * c.cols);
    for (int64_t row = 0; row < scale_rows_ * c.n_experts; ++row)
      for (int64_t i = 0; i + 1 < scale_stride_; ++i)
        scales_[row * scale_stride_ + i] =
            c.scale * (0.5f + (rng() % 64) / 64.f) * (rng() % 2 ? 1 : -1);
    for (int e = 0; e < c.n_experts; ++e)
      for (int r = 0; r < c.rows; ++r) fill_row(rng, e, r);
    on_gpu_ = std::make_unique<OnGpuBuffer<uint8_t>>(stream, bytes_);
    scales_on_gpu_ = std::make_unique<OnGpuBuffer<float>>(stream, scales_);
  }

  Weight view() const {
    return {.data = on_gpu_->data(),
            .stride = stride_,
            .type = c_.type,
            .rows = c_.rows,
            .cols = c_.cols,
            .scale = scales_on_gpu_->data(),
            .scale_stride = scale_stride_,
            .block_rows = c_.block,
            .block_cols = c_.block,
            .row0 = c_.row0};
  }
  ExpertWeights experts() const { return {view(), expert_bytes(), scale_rows_ * scale_stride_}; }
  double at(int row, int col) const {
    return values_[int64_t{row} * c_.cols + col];
  }  // the row counts over all experts
  // A scale in float, as exact_product() uses it.
  double scale_of(int row, int col) const {
    return scales_[(c_.row0 + row) / c_.block * scale_stride_ + col / c_.block];
  }

 private:
  int64_t expert_bytes() const { return c_.rows * stride_ * bytes_of(c_.type); }

  static uint8_t code_of(float v) {
    uint8_t code = 0;
    while (widen(fp8_e4m3{code}) != v) ++code;
    return code;
  }

  void fill_row(std::mt19937& rng, int e, int r) {
    uint8_t* const row = bytes_.data() + e * expert_bytes() + r * stride_ * bytes_of(c_.type);
    const int64_t unit = 16 / bytes_of(c_.type);
    std::memset(row, 0, (c_.cols + unit - 1) / unit * 16);
    for (int i = 0; i < c_.cols; ++i) {
      double& value = values_[(int64_t{e} * c_.rows + r) * c_.cols + i];
      const float random = c_.integers ? float(static_cast<int>(rng() % 9) - 4)
                                       : std::normal_distribution<float>(0, c_.scale)(rng);
      if (c_.type == Number::kF8E4M3) {
        const uint8_t code = c_.integers ? code_of(random) : rng() & 0xff;
        const uint8_t kept = (code & 0x7f) == 0x7f ? code - 1 : code;
        row[i] = kept;
        const int64_t scale_row = e * scale_rows_ + (c_.row0 + r) / c_.block;
        value = double{widen(fp8_e4m3{kept})} * scales_[scale_row * scale_stride_ + i / c_.block];
      } else if (c_.type == Number::kBF16) {
        const bf16 v = narrow(random);
        std::memcpy(row + 2 * i, &v, 2);
        value = widen(v);
      } else {
        std::memcpy(row + 4 * i, &random, 4);
        value = random;
      }
    }
  }

  WeightCase c_;
  int64_t stride_, scale_stride_, scale_rows_;
  std::vector<uint8_t> bytes_;
  std::vector<float> scales_;
  std::vector<double> values_;
  std::unique_ptr<OnGpuBuffer<uint8_t>> on_gpu_;
  std::unique_ptr<OnGpuBuffer<float>> scales_on_gpu_;
};

// Float rows with NaN between them.
struct Rows {
  int64_t n, cols, stride;
  std::vector<float> values;

  Rows(std::mt19937& rng, int64_t n_rows, int64_t n_cols, float deviation, int64_t pad)
      : n(n_rows), cols(n_cols), stride(n_cols + pad), values(n * stride, NAN) {
    std::normal_distribution<float> normal(0, deviation);
    for (int64_t r = 0; r < n; ++r)
      for (int64_t c = 0; c < cols; ++c) values[r * stride + c] = normal(rng);
  }
  float at(int64_t row, int64_t col) const { return values[row * stride + col]; }
};

}  // namespace tandem::gpu::test
