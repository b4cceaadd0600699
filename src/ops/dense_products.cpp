#include "ops/dense_products.h"

#include <cstring>
#include <vector>

#include "ops/cpu_weights.h"

namespace tandem {
namespace {

constexpr int kPanels = kPieceRows / cpu::kPanelRows;  // of a piece

}  // namespace

bool can_interleave(const cpu::KernelTable& kernels, const TensorView& w) {
  if (kernels.layout != cpu::Layout::kPanels || w.rows % kPieceRows != 0) return false;
  // Encoded rows of x are padded to a multiple, behind which the next row must begin.
  if (w.cols % cpu::kActivationMultiple != 0) return false;
  const auto takes = [&](DType dtype, cpu::ActivationType type) {
    return w.dtype == dtype && activation_for(kernels, dtype) == type;
  };
  return takes(DType::kBF16, cpu::ActivationType::kBF16) ||
         takes(DType::kF32, cpu::ActivationType::kF32);
}

void interleave(const TensorView& w, Team& team) {
  const int64_t panel_bytes = w.row_bytes(), n_steps = panel_bytes / cpu::kStepBytes;
  team.run(w.rows / kPieceRows, [&](int64_t piece, int) {
    std::byte* const to = w.row_data(piece * kPanels);
    const std::vector<std::byte> panels(to, to + kPanels * panel_bytes);
    for (int64_t step = 0; step < n_steps; ++step)
      for (int p = 0; p < kPanels; ++p)
        std::memcpy(to + (step * kPanels + p) * cpu::kStepBytes,
                    panels.data() + p * panel_bytes + step * cpu::kStepBytes, cpu::kStepBytes);
  });
}

}  // namespace tandem
