#include "ops/cuda_products.h"

#include <algorithm>
#include <set>

#include "core/rounding.h"
#include "gpu_kernels/products/plain_products.h"
#include "gpu_kernels/router.h"
#include "model/weights.h"
#include "ops/cuda_weights.h"

namespace tandem {
namespace {

constexpr int kBlockColsPerHead = 128;  // scale block columns for per-head tensor core kernels

struct Needs {
  int64_t columns = 0;   // columns of a rounded row
  int64_t partials = 0;  // floats
};

gpu::SkinnyArgs shape_of(int64_t rows, int64_t cols, Number type, int n_tokens,
                         const CudaLimits& gpu) {
  gpu::SkinnyArgs args = {};
  args.w = {.data = nullptr,
            .stride = cols,
            .type = type,
            .rows = static_cast<int>(rows),
            .cols = static_cast<int>(cols)};
  args.n_tokens = n_tokens;
  args.n_multiprocessors = gpu.n_multiprocessors;
  args.bytes_per_second = gpu.bytes_per_second;
  return args;
}

// The matrices that multiply_pair() and multiply_gated() take, [rows, rows of the second, cols].
struct Pair {
  gpu::Second second;
  int64_t rows, rows_2;
};
std::vector<Pair> pairs_of(const ModelConfig& c) {
  const int64_t q_rows = c.mla.q_rank > 0 ? c.mla.q_rank : int64_t{c.mla.n_heads} * c.mla.qk_dim();
  return {{gpu::Second::kBeside, q_rows, c.mla.cache_dim()},
          {gpu::Second::kGated, c.dense_dim, c.dense_dim},
          {gpu::Second::kGated, c.shared_dim(), c.shared_dim()}};
}

// Scratch for every dense matrix, in any of its formats.
Needs needs_of(const ModelConfig& config, const CudaLimits& limits) {
  ModelConfig dense = config;
  dense.router.n_experts = std::min(config.router.n_experts, 1);
  std::set<std::pair<int64_t, int64_t>> shapes = {{config.vocab, config.dim}};
  ModelWeights unused;
  for_each_weight(unused, dense, [&](const WeightSpec& spec, const QuantView&) {
    if (!is_vector(spec.use)) shapes.insert({spec.rows, spec.cols});
  });
  Needs needs;
  for (const auto& [rows, cols] : shapes)
    needs.columns = std::max(needs.columns, gpu::product_stride(cols));
  const auto add = [&](int64_t floats) { needs.partials = std::max(needs.partials, floats); };
  const std::vector<Pair> pairs = pairs_of(config);
  for (int n = 1; n <= limits.max_tokens; ++n) {
    for (const Number type : {Number::kBF16, Number::kF8E4M3}) {
      const bool few = n <= gpu::kSkinnyTokens;
      for (const auto& [rows, cols] : shapes) {
        const gpu::SkinnyArgs one = shape_of(rows, cols, type, n, limits);
        add(few ? gpu::skinny_partials(one)
                : gpu::matrix_partials(one.w, n, limits.n_multiprocessors));
      }
      if (!few) continue;
      for (const Pair& pair : pairs) {
        gpu::SkinnyArgs two = shape_of(pair.rows, config.dim, type, n, limits);
        two.second = pair.second;
        two.w_2 = two.w;
        two.w_2.rows = static_cast<int>(pair.rows_2);
        add(gpu::skinny_partials(two));
      }
    }
    gpu::RouterArgs router = {};
    router.tokens = n;
    router.n_experts = config.router.n_experts;
    router.w.cols = config.dim;
    router.n_multiprocessors = limits.n_multiprocessors;
    add(gpu::route_partials(router));
  }
  return needs;
}

// Whether one kernel can read both matrices.
bool share_a_kernel(const gpu::SkinnyArgs& a) {
  return a.n_tokens <= gpu::kSkinnyTokens && for_tensor_cores(a.w, kTileBlockCols) &&
         for_tensor_cores(a.w_2, kTileBlockCols) && a.w.type == a.w_2.type &&
         a.w.block_cols == a.w_2.block_cols;
}

int64_t rounded_bytes(const Needs& needs, int max_tokens) {
  return max_tokens * needs.columns * int64_t{sizeof(bf16)};
}

constexpr int64_t kCounterBytes = gpu::kCounters * int64_t{sizeof(uint32_t)};

}  // namespace

bool for_tensor_cores(const gpu::Weight& w, int block_cols) {
  return w.type == Number::kBF16 ||
         (w.type == Number::kF8E4M3 && w.scale && w.block_cols % block_cols == 0);
}

bool rounds_to_fp8(bool wanted, const gpu::Weight& w, int64_t n_tokens) {
  return wanted && n_tokens > gpu::kSkinnyTokens && gpu::takes_fp8_rows(w);
}

gpu::Fp8Rows fp8_rows_in(void* memory, int64_t n_rows, int64_t cols) {
  const int64_t stride = gpu::product_stride(cols);
  auto* const codes = static_cast<fp8_e4m3*>(memory);
  return {.codes = codes,
          .scales = reinterpret_cast<float*>(codes + n_rows * stride),
          .stride = stride,
          .scale_stride = ceil_div(cols, gpu::kFp8Block)};
}

CudaProducts::CudaProducts(const ModelConfig& config, CudaLimits limits, gpu::Stream& stream)
    : stream_(stream), limits_(limits), counters_(kCounterBytes, gpu::Site::kDevice) {
  const Needs needs = needs_of(config, limits);
  rounded_ = gpu::Buffer(rounded_bytes(needs, limits.max_tokens), gpu::Site::kDevice);
  partial_ = gpu::Buffer(needs.partials * int64_t{sizeof(float)}, gpu::Site::kDevice);
  const std::vector<uint32_t> zeros(gpu::kCounters);
  stream_.copy(zeros.data(), kCounterBytes, counters_.as<uint32_t>());
  stream_.wait();
}

int64_t CudaProducts::bytes_for(const ModelConfig& config, CudaLimits limits) {
  const Needs needs = needs_of(config, limits);
  return rounded_bytes(needs, limits.max_tokens) + needs.partials * int64_t{sizeof(float)} +
         kCounterBytes;
}

void CudaProducts::require_takes(const ModelConfig& c) {
  require(c.scale_block % 4 == 0,
          "weight_block_size {}: the GPU kernels need a multiple of 4; use --device cpu",
          c.scale_block);
  require(c.router.n_experts <= gpu::kMaxExperts,
          "{} experts: the router on a GPU supports at most {}; use --device cpu",
          c.router.n_experts, gpu::kMaxExperts);
}

void CudaProducts::multiply(TensorView x, const QuantView& weights, TensorView out) {
  const gpu::Weight w = gpu_weight(weights);
  const auto n_tokens = static_cast<int>(x.rows);
  if (!for_tensor_cores(w, kTileBlockCols)) return multiply_exactly(x, weights, out);
  if (n_tokens <= gpu::kSkinnyTokens) return gpu::skinny_product(stream_, skinny(x, w, out));
  gpu::MatrixArgs product = {.x = rounded_.as<bf16>(),
                             .w = w,
                             .out = static_cast<float*>(out.data),
                             .x_stride = gpu::product_stride(x.cols),
                             .out_stride = out.stride,
                             .n_tokens = n_tokens,
                             .workspace = workspace(),
                             .n_multiprocessors = limits_.n_multiprocessors};
  if (rounds_to_fp8(limits_.fp8_activations, w, n_tokens))
    product.x_fp8 = rounded_to_fp8(x);
  else
    gpu::round_rows(stream_, {.x = static_cast<const float*>(x.data),
                              .out = rounded_.as<bf16>(),
                              .x_stride = x.stride,
                              .out_stride = product.x_stride,
                              .n_rows = x.rows,
                              .cols = w.cols});
  gpu::matrix_product(stream_, product);
}

gpu::SkinnyArgs CudaProducts::skinny(TensorView x, const gpu::Weight& w, TensorView out) const {
  return {.x = static_cast<const float*>(x.data),
          .w = w,
          .out = static_cast<float*>(out.data),
          .x_stride = x.stride,
          .out_stride = out.stride,
          .n_tokens = static_cast<int>(x.rows),
          .workspace = workspace(),
          .n_multiprocessors = limits_.n_multiprocessors,
          .bytes_per_second = limits_.bytes_per_second};
}

bool CudaProducts::multiply_normalised(TensorView x, const QuantView& gain, float eps,
                                       const QuantView& weights, TensorView out) {
  const gpu::Weight w = gpu_weight(weights);
  if (x.rows > gpu::kSkinnyTokens || !for_tensor_cores(w, kTileBlockCols)) return false;
  gpu::SkinnyArgs args = skinny(x, w, out);
  args.gain = static_cast<const float*>(gain.q.data);
  args.eps = eps;
  gpu::skinny_product(stream_, args);
  return true;
}

bool CudaProducts::multiply_pair(TensorView x, const QuantView& w_0, TensorView out_0,
                                 const QuantView& w_1, TensorView out_1) {
  gpu::SkinnyArgs args = skinny(x, gpu_weight(w_0), out_0);
  args.w_2 = gpu_weight(w_1);
  if (!share_a_kernel(args)) return false;
  args.second = gpu::Second::kBeside;
  args.out_2 = static_cast<float*>(out_1.data);
  args.out_2_stride = out_1.stride;
  gpu::skinny_product(stream_, args);
  return true;
}

bool CudaProducts::multiply_gated(TensorView x, const QuantView& gate, const QuantView& up,
                                  TensorView out) {
  gpu::SkinnyArgs args = skinny(x, gpu_weight(gate), out);
  args.w_2 = gpu_weight(up);
  if (!share_a_kernel(args)) return false;
  args.second = gpu::Second::kGated;
  gpu::skinny_product(stream_, args);
  return true;
}

gpu::Fp8Rows CudaProducts::rounded_to_fp8(TensorView x) {
  const gpu::Fp8Rows rows = fp8_rows_in(rounded_.as<void>(), x.rows, x.cols);
  gpu::round_rows_fp8(stream_, {.x = static_cast<const float*>(x.data),
                                .out = rows,
                                .x_stride = x.stride,
                                .n_rows = x.rows,
                                .cols = static_cast<int>(x.cols)});
  return rows;
}

void CudaProducts::multiply_exactly(TensorView x, const QuantView& weights, TensorView out) {
  gpu::exact_product(stream_, {.x = static_cast<const float*>(x.data),
                               .w = gpu_weight(weights),
                               .out = static_cast<float*>(out.data),
                               .x_stride = x.stride,
                               .out_stride = out.stride,
                               .n_tokens = static_cast<int>(x.rows)});
}

bool CudaProducts::joins_parts(const LinearPerHead& a) {
  return !a.transposed && a.x.rows <= int64_t{gpu::kJoinTokens} * a.n_heads &&
         a.x.cols <= gpu::kMaxJoinedCols && for_tensor_cores(gpu_weight(a.w), kBlockColsPerHead);
}

void CudaProducts::multiply_per_head(const LinearPerHead& a, const gpu::AttentionParts& parts) {
  const gpu::Weight w = gpu_weight(a.w);
  const auto tokens = static_cast<int>(a.x.rows / a.n_heads);
  const auto x_cols = static_cast<int>(a.x.cols), out_cols = static_cast<int>(a.out.cols);
  const auto first_row = static_cast<int>(a.first_row);
  const auto rows_per_head = static_cast<int>(a.rows_per_head);
  if (for_tensor_cores(w, kBlockColsPerHead))
    return gpu::per_head_product(stream_, {.x = static_cast<const float*>(a.x.data),
                                           .w = w,
                                           .out = static_cast<float*>(a.out.data),
                                           .x_stride = a.x.stride,
                                           .out_stride = a.out.stride,
                                           .n_tokens = tokens,
                                           .n_heads = a.n_heads,
                                           .x_cols = x_cols,
                                           .out_cols = out_cols,
                                           .first_row = first_row,
                                           .rows_per_head = rows_per_head,
                                           .transposed = a.transposed,
                                           .parts = parts});
  gpu::plain_product(stream_, {.x = gpu_matrix(a.x),
                               .w = w,
                               .out = gpu_matrix(a.out),
                               .tokens = tokens,
                               .x_cols = x_cols,
                               .out_cols = out_cols,
                               .n_heads = a.n_heads,
                               .first_row = first_row,
                               .rows_per_head = rows_per_head,
                               .transposed = a.transposed});
}

}  // namespace tandem
