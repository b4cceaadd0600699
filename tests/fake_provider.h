// A provider of dense products that multiplies interleaved float or BF16 weights one number at a
// time, in double precision, and counts its calls.
#pragma once
#include <atomic>
#include <functional>
#include <utility>
#include <vector>

#include "ops/dense_products.h"
#include "tests/stored_numbers.h"

namespace tandem {

class FakeProvider final : public ProductProvider {
 public:
  std::string name() const override { return "a provider"; }
  bool prepare(DType weights, int64_t cols) override {
    prepared.emplace_back(weights, cols);
    return takes(weights, cols);
  }
  void multiply(const cpu::GemmArgs& a, int) override {
    ++n_calls;
    on_call(a);
    const DType dtype = a.w.type == cpu::WeightType::kBF16 ? DType::kBF16 : DType::kF32;
    const int64_t per_step = cpu::kStepBytes / cpu::kPanelRows / size_of(dtype);
    const TensorView x = {const_cast<void*>(a.x.data), a.m, a.k, a.k, dtype};
    const TensorView piece = {static_cast<std::byte*>(const_cast<void*>(a.w.data)) +
                                  a.first_row / cpu::kPanelRows * a.w.stride,
                              1, a.n * a.k, a.n * a.k, dtype};
    for (int i = 0; i < a.m; ++i)
      for (int j = 0; j < a.n; ++j) {
        double sum = 0;
        for (int64_t c = 0; c < a.k; ++c) {
          const int64_t at = (c / per_step * a.n + j) * per_step + c % per_step;
          sum += test::number(x, i, c) * test::number(piece, 0, at);
        }
        a.out[i * a.out_stride + j] = static_cast<float>(sum);
      }
  }

  std::vector<std::pair<DType, int64_t>> prepared;
  std::atomic<int> n_calls = 0;
  std::function<bool(DType, int64_t)> takes = [](DType, int64_t) { return true; };
  std::function<void(const cpu::GemmArgs&)> on_call = [](const cpu::GemmArgs&) {};
};

}  // namespace tandem
