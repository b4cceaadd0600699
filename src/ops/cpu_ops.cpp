#include "ops/cpu_ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/rounding.h"
#include "gpu_kernels/simulated_row.h"
#include "ops/cpu_sampler.h"
#include "ops/cpu_weights.h"
#include "ops/router.h"

namespace tandem {
namespace {

int max_columns(const ModelConfig& c) {
  return std::max({c.dim, c.dense_dim, c.mla.n_heads * c.mla.v_dim, c.mla.q_rank, c.mla.kv_rank,
                   c.shared_dim()});
}

}  // namespace

DType cache_type_for(const cpu::KernelTable& kernels) {
  return kernels.isa == cpu::Isa::kReference ? DType::kF32 : DType::kBF16;
}

// Calls visit(view, rows, cols, dtype) once for every scratch matrix.
template <class Visit>
void CpuOps::for_each_scratch(const ModelConfig& c, int64_t max_tokens, Visit visit) {
  const MlaConfig& m = c.mla;
  const int64_t threads = team_.size(), slots = std::max<int64_t>(16, 2 * threads);
  visit(encoded_, max_tokens, cpu::encoded_columns(max_columns(c)), DType::kBF16);
  visit(latents_, kRestoredTokens, cpu::encoded_columns(m.kv_rank), DType::kF32);
  visit(restored_, threads * kRestoredRows, m.nope_dim + m.v_dim, DType::kF32);
  visit(keys_values_, threads * kRestoredTokens, m.nope_dim + m.v_dim, DType::kF32);
  visit(max_, 1, max_tokens * m.n_heads, DType::kF32);
  visit(sum_, 1, max_tokens * m.n_heads, DType::kF32);
  visit(part_out_, slots * kPartRows, m.kv_rank, DType::kF32);
  visit(part_max_, 1, slots * kPartRows, DType::kF32);
  visit(part_sum_, 1, slots * kPartRows, DType::kF32);
  visit(route_of_thread_, threads, 2 * c.router.n_experts + c.router.n_groups, DType::kF32);
}

CpuOps::CpuOps(const cpu::KernelTable& kernels, const ModelConfig& c, int max_tokens, Team& team)
    : kernels_(kernels), team_(team) {
  const MlaConfig& m = c.mla;
  require(m.cache_dim() <= cpu::kMaxKeyDim && m.qk_dim() <= cpu::kMaxKeyDim &&
              std::max(m.kv_rank, m.v_dim) <= cpu::kMaxValueDim,
          "kv_lora_rank {}, qk_nope_head_dim {}, qk_rope_head_dim {}, v_head_dim {}: attention on "
          "the CPU supports keys of at most {} and values of at most {} numbers",
          m.kv_rank, m.nope_dim, m.rope_dim, m.v_dim, cpu::kMaxKeyDim, cpu::kMaxValueDim);
  arena_ = Arena::holding([&](auto visit) { for_each_scratch(c, max_tokens, visit); });
  parts_.reserve(part_out_.rows / kPartRows);
}

void CpuOps::embed(std::span<const int32_t> tokens, const QuantView& table, TensorView out) {
  const auto n = std::ssize(tokens);
  for_each(n, n * out.cols, [&](int64_t i, int) {
    kernels_.decode(
        {table.q.row_data(tokens[i]), kernel_type(table.q.dtype), out.row<float>(i), out.cols});
  });
}

void CpuOps::rms_norm(TensorView x, const QuantView& gain, float eps, TensorView out) {
  for_each(x.rows, x.rows * x.cols, [&](int64_t r, int) {
    kernels_.rms_norm(
        {x.row<float>(r), gain.q.row<float>(0), out.row<float>(r), static_cast<int>(x.cols), eps});
  });
}

void CpuOps::add(TensorView x, TensorView delta) {
  for_each(x.rows, x.rows * x.cols, [&](int64_t r, int) {
    float* to = x.row<float>(r);
    const float* from = delta.row<float>(r);
    for (int64_t i = 0; i < x.cols; ++i) to[i] += from[i];
  });
}

void CpuOps::clear(TensorView x) {
  for (int64_t r = 0; r < x.rows; ++r) std::fill_n(x.row<float>(r), x.cols, 0.f);
}

void CpuOps::linear(TensorView x, const QuantView& w, TensorView out) {
  const bool provided =
      provider_ && std::binary_search(provided_.begin(), provided_.end(), w.q.data);
  if (!provided) return product(encoded(x, w), x.rows, w, out);
  if (activation_for(kernels_, w.q.dtype) == cpu::ActivationType::kF32) x = side_by_side(x);
  product(encoded(x, w), x.rows, w, out, provider_);
}

TensorView CpuOps::side_by_side(TensorView x) {
  if (x.stride == x.cols) return x;
  const TensorView rows = {rows_.data(), x.rows, x.cols, x.cols, DType::kF32};
  for_each(x.rows, x.rows * x.cols,
           [&](int64_t r, int) { std::copy_n(x.row<float>(r), x.cols, rows.row<float>(r)); });
  return rows;
}

void CpuOps::use(ProductProvider* provider, std::vector<const void*> matrices) {
  provider_ = provider;
  provided_ = std::move(matrices);
  std::sort(provided_.begin(), provided_.end());
  if (provider && !rows_.data())
    rows_ = Buffer(encoded_.rows * encoded_.cols * size_of(DType::kF32));
}

void CpuOps::product(const cpu::Activations& x, int64_t n_rows, const QuantView& w, TensorView out,
                     ProductProvider* provider) {
  const int64_t n_pieces = ceil_div(w.q.rows, kPieceRows);
  for_each(n_pieces, n_rows * w.q.rows * w.q.cols, [&](int64_t i, int thread) {
    const int64_t first = i * kPieceRows;
    const cpu::GemmArgs args = {
        .x = x,
        .w = kernel_weight(w),
        .first_row = first,
        .out = out.row<float>(0) + first,
        .out_stride = out.stride,
        .m = static_cast<int>(n_rows),
        .n = static_cast<int>(std::min<int64_t>(kPieceRows, w.q.rows - first)),
        .k = static_cast<int>(w.q.cols)};
    if (provider) return provider->multiply(args, thread);
    kernels_.gemm(args);
  });
}

// Encodes x as the fastest product with w needs it, rows side by side.
cpu::Activations CpuOps::encoded(TensorView x, const QuantView& w) {
  const cpu::ActivationType type = activation_for(kernels_, w.q.dtype);
  check(type != cpu::ActivationType::kU8, "only routed experts are kept in integers");
  if (type == cpu::ActivationType::kF32) return {x.data, x.row_bytes(), type};
  TensorView rows = encoded_;
  rows.stride = cpu::encoded_columns(x.cols);
  for_each(x.rows, x.rows * x.cols, [&](int64_t r, int) {
    kernels_.encode({x.row<float>(r), static_cast<int>(x.cols), type, rows.row_data(r)});
  });
  return {rows.data, rows.row_bytes(), type};
}

void CpuOps::linear_per_head(const LinearPerHead& a) {
  const int64_t rows = a.transposed ? a.x.cols : a.out.cols;
  const auto product = a.transposed ? kernels_.gemm_transposed : kernels_.gemm;
  for_each(a.n_heads, a.x.rows * a.x.cols * a.out.cols, [&](int64_t h, int) {
    product({.x = {a.x.row_data(h), a.x.row_bytes() * a.n_heads, cpu::ActivationType::kF32},
             .w = kernel_weight(a.w),
             .first_row = a.first_row + h * a.rows_per_head,
             .out = a.out.row<float>(h),
             .out_stride = a.out.stride * a.n_heads,
             .m = static_cast<int>(a.x.rows / a.n_heads),
             .n = static_cast<int>(rows),
             .k = static_cast<int>(a.w.q.cols)});
  });
}

// The angle is a float product, as in the checkpoints' own code; its sine is exact.
void CpuOps::rope(TensorView x, std::span<const int32_t> positions, const RopeTable& table) {
  const int64_t rows_per_token = x.rows / static_cast<int64_t>(positions.size());
  const auto n = static_cast<int64_t>(positions.size());
  for_each(n, x.rows * x.cols * 16, [&](int64_t t, int) {
    for (size_t i = 0; i < table.frequencies.size(); ++i) {
      const float angle = static_cast<float>(positions[t]) * table.frequencies[i];
      const float cos = std::cos(angle) * table.amplitude, sin = std::sin(angle) * table.amplitude;
      for (int64_t r = t * rows_per_token; r < (t + 1) * rows_per_token; ++r) {
        float* pair = x.row<float>(r) + 2 * i;
        const float a = pair[0], b = pair[1];
        pair[0] = a * cos - b * sin;
        pair[1] = a * sin + b * cos;
      }
    }
  });
}

void CpuOps::silu_mul(TensorView gate, TensorView up) {
  for_each(gate.rows, gate.rows * gate.cols * 8, [&](int64_t r, int) {
    kernels_.silu_mul({gate.row<float>(r), up.row<float>(r), gate.row<float>(r), gate.cols});
  });
}

void CpuOps::route(const RouteArgs& a) {
  const size_t n = a.router.n_experts, k = a.router.n_active, groups = a.router.n_groups;
  const std::span<const float> no_bias;
  product({a.x.data, a.x.row_bytes(), cpu::ActivationType::kF32}, a.x.rows, a.w, a.logits);
  for_each(a.x.rows, a.logits.rows * a.logits.cols * 16, [&](int64_t t, int thread) {
    float* scratch = route_of_thread_.row<float>(thread);
    route_token({a.logits.row<float>(t), n},
                a.bias.empty() ? no_bias : std::span<const float>(a.bias.q.row<float>(0), n),
                a.router, {{scratch, n}, {scratch + n, n}, {scratch + 2 * n, groups}},
                {a.out.ids.row<int32_t>(t), k}, {a.out.weights.row<float>(t), k});
    if (const SimulatedRows& s = a.simulated; s.ids.rows > 0)
      std::copy_n(s.ids.row<int32_t>(simulated_row(s.first_token + t * s.token_stride,
                                                   s.positions[t], s.ids.rows, s.varies)),
                  k, a.out.ids.row<int32_t>(t));
  });
  if (ranks_.first_routes()) ranks_.take_routing_of_first(a.out);
  if (!a.uses) return;
  for (int64_t t = 0; t < a.x.rows; ++t)
    for (const int32_t id : std::span(a.out.ids.row<int32_t>(t), k)) ++a.uses[id];
}

void CpuOps::gather_rows(TensorView x, std::span<const int32_t> rows, TensorView out) {
  for (size_t i = 0; i < rows.size(); ++i)
    std::copy_n(x.row<float>(rows[i]), x.cols, out.row<float>(i));
}

void CpuDevice::copy(const void* from, int64_t bytes, void* to) {
  constexpr int64_t kAtOnce = 1 << 16;
  team_.run(ceil_div(bytes, kAtOnce), [&](int64_t i, int) {
    const int64_t first = i * kAtOnce;
    std::memcpy(static_cast<std::byte*>(to) + first, static_cast<const std::byte*>(from) + first,
                static_cast<size_t>(std::min(kAtOnce, bytes - first)));
  });
}

void CpuDevice::to_host(TensorView x, TensorView out) { copy_rows(x, out); }

std::unique_ptr<DeviceSampler> CpuDevice::make_sampler(std::span<const uint32_t> allowed,
                                                       int n_tokens, int) {
  return std::make_unique<CpuSampler>(allowed, n_tokens, team_);
}

}  // namespace tandem
