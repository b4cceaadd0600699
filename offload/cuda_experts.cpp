#include "offload/cuda_experts.h"

#include "gpu_kernels/kernels.h"
#include "gpu_kernels/plain_products.h"
#include "gpu_kernels/products.h"
#include "ops/cuda_ops.h"
#include "ops/cuda_weights.h"

namespace tandem {
namespace {

constexpr int kBlockCols = 64;  // of the scales that tensor cores' kernels take

// One matrix of all experts of a layer, which lie at equal distances.
gpu::ExpertWeights all_of(const std::vector<FfnWeights>& experts, QuantView FfnWeights::*which) {
  const QuantView& first = experts[0].*which;
  gpu::ExpertWeights all = {.first = gpu_weight(first), .weight_stride = 0, .scale_stride = 0};
  if (experts.size() == 1) return all;
  const auto data = [&](size_t e) { return (experts[e].*which).q.row_data(0); };
  const auto scale = [&](size_t e) { return static_cast<float*>((experts[e].*which).scale.data); };
  all.weight_stride = data(1) - data(0);
  if (!first.scale.empty()) all.scale_stride = scale(1) - scale(0);
  for (size_t e = 0; e < experts.size(); ++e) {
    const auto at = static_cast<int64_t>(e);
    check(data(e) == data(0) + at * all.weight_stride &&
              (first.scale.empty() || scale(e) == scale(0) + at * all.scale_stride) &&
              (experts[e].*which).q.dtype == first.q.dtype,
          "experts lie at equal distances");
  }
  return all;
}

struct Scratch {
  int64_t offsets, pairs, x, hidden, rows;  // bytes
  int64_t sum() const { return offsets + 2 * pairs + x + hidden + rows; }
};

Scratch scratch_for(const ModelConfig& c, int max_tokens) {
  const int64_t pairs = int64_t{max_tokens} * c.router.n_active, i32 = sizeof(int32_t);
  if (c.router.n_experts == 0) return {};
  return {.offsets = (c.router.n_experts + 1) * i32,
          .pairs = pairs * i32,
          .x = max_tokens * gpu::product_stride(c.dim) * int64_t{sizeof(bf16)},
          .hidden = pairs * gpu::product_stride(c.expert_dim) * int64_t{sizeof(float)},
          .rows = pairs * c.dim * int64_t{sizeof(float)}};
}

bool for_tensor_cores(const gpu::ExpertWeights& w) {
  return tandem::for_tensor_cores(w.first, kBlockCols);
}

}  // namespace

CudaExperts::CudaExperts(const ModelConfig& config, const ModelWeights& weights, int max_tokens,
                         gpu::Stream& stream)
    : c_(config), stream_(stream), layers_(weights.layers.size()) {
  check(weights.slices.size() <= 1, "experts on a GPU are not cut");
  for (size_t l = 0; l < layers_.size(); ++l) {
    const std::vector<FfnWeights>& experts = weights.layers[l].experts;
    if (experts.empty()) continue;
    layers_[l] = {all_of(experts, &FfnWeights::gate), all_of(experts, &FfnWeights::up),
                  all_of(experts, &FfnWeights::down)};
  }
  const Scratch bytes = scratch_for(config, max_tokens);
  offsets_ = gpu::Buffer(bytes.offsets, gpu::Site::kDevice);
  row_of_ = gpu::Buffer(bytes.pairs, gpu::Site::kDevice);
  tokens_of_rows_ = gpu::Buffer(bytes.pairs, gpu::Site::kDevice);
  x_ = gpu::Buffer(bytes.x, gpu::Site::kDevice);
  hidden_ = gpu::Buffer(bytes.hidden, gpu::Site::kDevice);
  rows_ = gpu::Buffer(bytes.rows, gpu::Site::kDevice);
}

int64_t CudaExperts::bytes_for(const ModelConfig& c, int max_tokens) {
  return scratch_for(c, max_tokens).sum();
}

void CudaExperts::submit(const ExpertBatch& batch) {
  batch_ = batch;
  const Layer& layer = layers_[batch.layer];
  if (!for_tensor_cores(layer.gate) || !for_tensor_cores(layer.down)) return;
  const TensorView& ids = batch.routing.ids;
  const auto tokens = static_cast<int>(batch.x.rows), n_active = static_cast<int>(ids.cols);
  gpu::sort_pairs(stream_, {.ids = static_cast<const int32_t*>(ids.data),
                            .ids_stride = ids.stride,
                            .offsets = offsets_.as<int32_t>(),
                            .row_of = row_of_.as<int32_t>(),
                            .tokens_of_rows = tokens_of_rows_.as<int32_t>(),
                            .tokens = tokens,
                            .n_active = n_active,
                            .n_experts = c_.router.n_experts});
  gpu::round_rows(stream_, {.x = static_cast<const float*>(batch.x.data),
                            .out = x_.as<bf16>(),
                            .x_stride = batch.x.stride,
                            .out_stride = gpu::product_stride(c_.dim),
                            .n_rows = tokens,
                            .cols = c_.dim});
  gpu::grouped_gate_up(stream_, {.x = x_.as<bf16>(),
                                 .tokens = tokens_of_rows_.as<int32_t>(),
                                 .rows = rows_of(tokens),
                                 .gate = layer.gate,
                                 .up = layer.up,
                                 .hidden = hidden_.as<bf16>(),
                                 .x_stride = gpu::product_stride(c_.dim),
                                 .hidden_stride = gpu::product_stride(c_.expert_dim)});
}

gpu::ExpertRows CudaExperts::rows_of(int tokens) const {
  return {.offsets = offsets_.as<int32_t>(),
          .n_experts = c_.router.n_experts,
          .max_rows = tokens * c_.router.n_active};
}

void CudaExperts::add_to(TensorView y) {
  const Layer& layer = layers_[batch_.layer];
  if (!for_tensor_cores(layer.gate) || !for_tensor_cores(layer.down)) return add_plainly(y);
  const TensorView& weights = batch_.routing.weights;
  check(weights.stride == weights.cols, "weights of a step's experts are dense");
  const auto tokens = static_cast<int>(y.rows);
  gpu::grouped_down(stream_, {.hidden = hidden_.as<bf16>(),
                              .rows = rows_of(tokens),
                              .down = layer.down,
                              .out = rows_.as<float>(),
                              .hidden_stride = gpu::product_stride(c_.expert_dim),
                              .out_stride = c_.dim});
  gpu::combine_experts(stream_, {.rows = rows_.as<float>(),
                                 .row_of = row_of_.as<int32_t>(),
                                 .weights = static_cast<const float*>(weights.data),
                                 .y = static_cast<float*>(y.data),
                                 .row_stride = c_.dim,
                                 .y_stride = y.stride,
                                 .n_tokens = tokens,
                                 .n_active = static_cast<int>(weights.cols),
                                 .cols = c_.dim,
                                 .add = true});
}

// What tensor cores do not take: float weights, scales of other blocks.
void CudaExperts::add_plainly(TensorView y) {
  const Layer& layer = layers_[batch_.layer];
  const TensorView& ids = batch_.routing.ids;
  const auto plain = [](const gpu::ExpertWeights& w) {
    return gpu::PlainExpertWeights{w.first, w.weight_stride, w.scale_stride};
  };
  gpu::plain_experts(stream_, {.x = gpu_matrix(batch_.x),
                               .gate = plain(layer.gate),
                               .up = plain(layer.up),
                               .down = plain(layer.down),
                               .ids = static_cast<const int32_t*>(ids.data),
                               .ids_stride = ids.stride,
                               .weights = gpu_matrix(batch_.routing.weights),
                               .hidden = {hidden_.as<float>(), c_.expert_dim},
                               .y = gpu_matrix(y),
                               .tokens = static_cast<int>(y.rows),
                               .n_active = static_cast<int>(ids.cols)});
}

}  // namespace tandem
