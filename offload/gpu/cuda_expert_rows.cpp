#include "offload/gpu/cuda_expert_rows.h"

#include "core/rounding.h"
#include "gpu_kernels/kernels.h"
#include "ops/cuda_products.h"

namespace tandem {
namespace {

struct RowScratch {
  int64_t offsets, pairs, x, hidden, rows;  // bytes
  int64_t sum() const { return offsets + 2 * pairs + x + hidden + rows; }
};

RowScratch scratch_for(const ModelConfig& c, int max_tokens) {
  const int64_t pairs = int64_t{max_tokens} * c.router.n_active, i32 = sizeof(int32_t);
  if (c.router.n_experts == 0) return {};
  return {.offsets = ExpertPool::kMaxTickets * (c.router.n_experts + 1) * i32,
          .pairs = pairs * i32,
          .x = max_tokens * gpu::product_stride(c.dim) * int64_t{sizeof(bf16)},
          .hidden = pairs * gpu::product_stride(c.expert_dim) * int64_t{sizeof(float)},
          .rows = pairs * c.dim * int64_t{sizeof(float)}};
}

}  // namespace

CudaExpertRows::CudaExpertRows(const ModelConfig& config, int max_tokens, gpu::Stream& stream,
                               bool fp8_activations)
    : c_(config), stream_(stream), fp8_activations_(fp8_activations) {
  const RowScratch bytes = scratch_for(config, max_tokens);
  offsets_ = gpu::Buffer(bytes.offsets, gpu::Site::kDevice);
  row_of_ = gpu::Buffer(bytes.pairs, gpu::Site::kDevice);
  tokens_of_rows_ = gpu::Buffer(bytes.pairs, gpu::Site::kDevice);
  x_ = gpu::Buffer(bytes.x, gpu::Site::kDevice);
  hidden_ = gpu::Buffer(bytes.hidden, gpu::Site::kDevice);
  rows_ = gpu::Buffer(bytes.rows, gpu::Site::kDevice);
}

int64_t CudaExpertRows::bytes_for(const ModelConfig& c, int max_tokens) {
  return scratch_for(c, max_tokens).sum();
}

CudaExpertRows::Sorted CudaExpertRows::sort(const ExpertBatch& batch, int n_experts,
                                            const gpu::Weight& like) {
  const TensorView& ids = batch.routing.ids;
  const auto tokens = static_cast<int>(batch.x.rows);
  Sorted rows = {.first_row = batch.first_row,
                 .first_pair = batch.first_row * ids.cols,
                 .ticket = batch.micro_batch,
                 .weights = batch.routing.weights,
                 .x_fp8 = {},
                 .hidden_fp8 = {}};
  gpu::sort_pairs(stream_, {.ids = static_cast<const int32_t*>(ids.data),
                            .ids_stride = ids.stride,
                            .offsets = offsets_of(rows),
                            .row_of = row_of_.as<int32_t>() + rows.first_pair,
                            .tokens_of_rows = tokens_of_rows_.as<int32_t>() + rows.first_pair,
                            .tokens = tokens,
                            .n_active = static_cast<int>(ids.cols),
                            .n_experts = n_experts});
  if (rounds_to_fp8(fp8_activations_, like, tokens)) {
    const int64_t pairs = ids.rows * ids.cols;
    rows.x_fp8 = fp8_rows_in(x_of(rows), tokens, c_.dim);
    rows.hidden_fp8 = fp8_rows_in(hidden_of(rows) + pairs * gpu::product_stride(c_.expert_dim),
                                  pairs, c_.expert_dim);
  }
  round(rows, batch.x);
  return rows;
}

bf16* CudaExpertRows::x_of(const Sorted& rows) const {
  return x_.as<bf16>() + rows.first_row * gpu::product_stride(c_.dim);
}

// Offsets are those of float pairs, twice the size of BF16.
bf16* CudaExpertRows::hidden_of(const Sorted& rows) const {
  return hidden_.as<bf16>() + 2 * rows.first_pair * gpu::product_stride(c_.expert_dim);
}

void CudaExpertRows::round(const Sorted& rows, TensorView x) {
  if (rows.x_fp8.codes)
    return gpu::round_rows_fp8(stream_, {.x = static_cast<const float*>(x.data),
                                         .out = rows.x_fp8,
                                         .x_stride = x.stride,
                                         .n_rows = x.rows,
                                         .cols = c_.dim});
  gpu::round_rows(stream_, {.x = static_cast<const float*>(x.data),
                            .out = x_of(rows),
                            .x_stride = x.stride,
                            .out_stride = gpu::product_stride(c_.dim),
                            .n_rows = x.rows,
                            .cols = c_.dim});
}

void CudaExpertRows::gate_up(const Sorted& rows, const gpu::ExpertWeights& gate,
                             const gpu::ExpertWeights& up, Range experts) {
  gpu::grouped_gate_up(stream_, {.x = x_of(rows),
                                 .x_fp8 = rows.x_fp8,
                                 .tokens = tokens_of_rows_.as<int32_t>() + rows.first_pair,
                                 .rows = rows_of(rows, experts),
                                 .gate = gate,
                                 .up = up,
                                 .hidden = hidden_of(rows),
                                 .x_stride = gpu::product_stride(c_.dim),
                                 .hidden_stride = gpu::product_stride(c_.expert_dim)});
}

void CudaExpertRows::down(const Sorted& rows, const gpu::ExpertWeights& down, Range experts) {
  if (rows.hidden_fp8.codes)
    gpu::round_hidden_fp8(stream_, {.hidden = hidden_of(rows),
                                    .rows = rows_of(rows, experts),
                                    .out = rows.hidden_fp8,
                                    .hidden_stride = gpu::product_stride(c_.expert_dim),
                                    .cols = c_.expert_dim});
  gpu::grouped_down(stream_, {.hidden = hidden_of(rows),
                              .hidden_fp8 = rows.hidden_fp8,
                              .rows = rows_of(rows, experts),
                              .down = down,
                              .out = rows_.as<float>() + rows.first_pair * c_.dim,
                              .hidden_stride = gpu::product_stride(c_.expert_dim),
                              .out_stride = c_.dim});
}

void CudaExpertRows::add_to(const Sorted& rows, TensorView y) {
  const TensorView& weights = rows.weights;
  gpu::combine_experts(stream_, {.rows = rows_.as<float>() + rows.first_pair * c_.dim,
                                 .row_of = row_of_.as<int32_t>() + rows.first_pair,
                                 .weights = static_cast<const float*>(weights.data),
                                 .y = static_cast<float*>(y.data),
                                 .row_stride = c_.dim,
                                 .y_stride = y.stride,
                                 .n_tokens = static_cast<int>(y.rows),
                                 .n_active = static_cast<int>(weights.cols),
                                 .cols = c_.dim,
                                 .add = true,
                                 .weights_stride = weights.stride});
}

// All pairs may choose these experts, but an expert is expected to have its share of the model's.
gpu::ExpertRows CudaExpertRows::rows_of(const Sorted& rows, Range experts) const {
  const auto pairs = static_cast<int>(rows.weights.rows * rows.weights.cols);
  return {.offsets = offsets_of(rows) + experts.first,
          .n_experts = experts.n,
          .max_rows = pairs,
          .usual_rows = ceil_div(pairs, c_.router.n_experts)};
}

}  // namespace tandem
