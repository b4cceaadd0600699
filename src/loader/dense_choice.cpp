#include "loader/dense_choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/clock.h"

namespace tandem {
namespace {

constexpr int kRuns = 5;            // of each, in turn
constexpr int kPiecesOfThread = 4;  // measured at once

// All matrices of a shape.
using Matrices = std::vector<TensorView>;

// Those that only linear() reads: keys and values are restored from kv_b by other products, and the
// router's products are always the kernels'.
std::vector<Matrices> dense_matrices(const DenseModel& model, ProductProvider& provider) {
  std::vector<Matrices> all;
  for_each_weight(model.weights, model.config, [&](const WeightSpec& spec, QuantView& w) {
    const bool is_dense = spec.use == WeightUse::kAttention || spec.use == WeightUse::kDense ||
                          spec.use == WeightUse::kShared || spec.use == WeightUse::kHead;
    if (!is_dense || spec.name.ends_with(".kv_b_proj.weight")) return;
    if (!can_interleave(model.kernels, w.q) || !provider.prepare(w.q.dtype, w.q.cols)) return;
    const auto same = std::find_if(all.begin(), all.end(), [&](const Matrices& m) {
      return m[0].rows == w.q.rows && m[0].cols == w.q.cols && m[0].dtype == w.q.dtype;
    });
    if (same != all.end())
      same->push_back(w.q);
    else
      all.push_back({w.q});
  });
  return all;
}

// Parts of n_rows rows, so that each run reads memory that the ones before it did not.
std::vector<QuantView> parts_of(const Matrices& matrices, int64_t n_rows) {
  std::vector<QuantView> parts;
  for (const TensorView& whole : matrices)
    for (int64_t first = 0; first + n_rows <= whole.rows; first += n_rows) {
      TensorView part = whole;
      part.data = whole.row_data(first / cpu::kPanelRows);
      part.rows = n_rows;
      parts.push_back({.q = part, .scale = {}});
    }
  return parts;
}

// The provider's time over that of the kernels, with n rows of x. Its products of panels that are
// not interleaved take as long, and their results are not used.
double time_ratio(const DenseModel& model, ProductProvider& provider, const Matrices& matrices,
                  int n) {
  const int64_t n_outputs =
      std::min<int64_t>(matrices[0].rows, kPieceRows * kPiecesOfThread * model.team.size());
  const std::vector<QuantView> parts = parts_of(matrices, n_outputs);
  std::vector<const void*> addresses;
  for (const QuantView& part : parts) addresses.push_back(part.q.data);
  TensorView x, out;
  const Arena arena = Arena::holding([&](auto visit) {
    visit(x, n, matrices[0].cols, DType::kF32);
    visit(out, n, n_outputs, DType::kF32);
  });
  std::fill_n(x.row<float>(0), x.rows * x.cols, 1.f);

  double seconds[2] = {std::numeric_limits<double>::max(), std::numeric_limits<double>::max()};
  for (size_t run = 0; run < 2 * kRuns; ++run) {
    double& least = seconds[run % 2];
    model.ops.use(run % 2 == 1 ? &provider : nullptr, addresses);
    const QuantView& w = parts[run % parts.size()];
    least = std::min(least, seconds_of([&] { model.ops.linear(x, w, out); }));
  }
  return seconds[1] / seconds[0];
}

bool is_faster(const DenseModel& model, ProductProvider& provider, const Matrices& matrices) {
  double logarithms = 0;
  for (const int n : kMeasuredRows)
    if (n <= model.max_tokens) logarithms += std::log(time_ratio(model, provider, matrices, n));
  return logarithms < 0;
}

}  // namespace

std::string choose_products(const DenseModel& model, ProductProvider& provider,
                            DenseProducts wanted) {
  std::vector<Matrices> chosen = dense_matrices(model, provider);
  if (chosen.empty()) {
    const std::string why_not = fmt::format(
        "{} has no fast product for a dense matrix of this model as the {} kernels keep it",
        provider.name(), model.kernels.name);
    require(wanted != DenseProducts::kOneDnn, "--dense-products onednn: {}: leave it out", why_not);
    return "tandem's kernels: " + why_not;
  }
  if (wanted == DenseProducts::kFastest)
    std::erase_if(chosen, [&](const Matrices& m) { return !is_faster(model, provider, m); });
  std::string shapes;
  std::vector<const void*> addresses;
  for (const Matrices& matrices : chosen) {
    shapes +=
        fmt::format("{}[{}, {}]", shapes.empty() ? "" : ", ", matrices[0].rows, matrices[0].cols);
    for (const TensorView& w : matrices) {
      interleave(w, model.team);
      addresses.push_back(w.data);
    }
  }
  model.ops.use(chosen.empty() ? nullptr : &provider, std::move(addresses));
  if (chosen.empty()) return fmt::format("tandem's kernels, faster than {}", provider.name());
  return fmt::format("{} for {}; tandem's kernels for the others", provider.name(), shapes);
}

}  // namespace tandem
