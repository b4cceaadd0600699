#include "ops/cuda_ops.h"

#include "core/rounding.h"
#include "model/rope.h"
#include "ops/cuda_weights.h"

namespace tandem {
namespace {

int max_pages(CudaLimits limits) { return static_cast<int>(ceil_div(limits.context, kPageSize)); }

gpu::GroupScore group_score(const RouterConfig& r) {
  if (r.method == TopkMethod::kGreedy || r.n_groups == 1) return gpu::GroupScore::kNone;
  return r.method == TopkMethod::kNoauxTc ? gpu::GroupScore::kSumOfBestTwo : gpu::GroupScore::kBest;
}

int rows_of(TensorView t) { return static_cast<int>(t.rows); }
int cols_of(TensorView t) { return static_cast<int>(t.cols); }

}  // namespace

gpu::RouterArgs router_form(const RouterConfig& r) {
  const bool normalize = r.normalize && r.n_active > 1;
  gpu::RouterArgs args = {};
  args.n_experts = r.n_experts;
  args.n_active = r.n_active;
  args.n_groups = r.n_groups;
  args.n_active_groups = r.n_active_groups;
  args.scoring =
      r.scoring == Scoring::kSoftmax ? gpu::RouterScoring::kSoftmax : gpu::RouterScoring::kSigmoid;
  args.group_score = group_score(r);
  args.simulated_ranks = r.simulated_ranks;
  args.normalize = normalize;
  args.scale = normalize && !r.scale_normalized ? 1 : r.scale;
  return args;
}

CudaOps::CudaOps(const ModelConfig& c, CudaLimits limits, gpu::Stream& stream)
    : stream_(stream),
      kv_rank_(c.mla.kv_rank),
      batch_(limits.max_tokens, max_pages(limits)),
      products_(c, limits, stream),
      attention_(c.mla, limits, batch_, products_, stream),
      frequencies_(int64_t{c.mla.rope_dim} / 2 * int64_t{sizeof(float)}, gpu::Site::kDevice) {
  require_takes(c);
  const std::vector<float> frequencies = rope_frequencies(c.rope, c.mla.rope_dim);
  stream_.copy(frequencies.data(), frequencies_.bytes(), frequencies_.as<float>());
  stream_.wait();
}

// Waits for kernels that still use the buffers. The loss of a GPU was reported before.
CudaOps::~CudaOps() {
  try {
    stream_.wait();
  } catch (const Error&) {
  }
}

void CudaOps::require_takes(const ModelConfig& c) {
  require(c.scale_block % 4 == 0,
          "weight_block_size {}: the GPU kernels need a multiple of 4; use --device cpu",
          c.scale_block);
  require(c.router.n_experts <= gpu::kMaxExperts,
          "{} experts: the router on a GPU supports at most {}; use --device cpu",
          c.router.n_experts, gpu::kMaxExperts);
  CudaAttention::require_takes(c.mla);
}

int64_t CudaOps::bytes_for(const ModelConfig& c, CudaLimits limits) {
  return CudaBatch::bytes_for(limits.max_tokens, max_pages(limits)) +
         CudaProducts::bytes_for(c, limits) + CudaAttention::bytes_for(c.mla, limits);
}

void CudaOps::embed(std::span<const int32_t> tokens, const QuantView& table, TensorView out) {
  const gpu::Weight w = gpu_weight(table);
  gpu::embed(stream_, {.tokens = batch_.on_gpu(tokens),
                       .table = w.data,
                       .table_stride = w.stride,
                       .type = w.type,
                       .out = gpu_matrix(out),
                       .rows = rows_of(out),
                       .cols = cols_of(out)});
}

void CudaOps::rms_norm(TensorView x, const QuantView& gain, float eps, TensorView out) {
  gpu::rms_norm(stream_, {.x = gpu_matrix(x),
                          .gain = static_cast<const float*>(gain.q.data),
                          .out = gpu_matrix(out),
                          .rows = rows_of(x),
                          .dim = cols_of(x),
                          .eps = eps});
}

void CudaOps::add(TensorView x, TensorView delta) {
  gpu::add(stream_, {gpu_matrix(x), gpu_matrix(delta), rows_of(x), cols_of(x)});
}

void CudaOps::clear(TensorView x) {
  gpu::clear(stream_, {gpu_matrix(x), {}, rows_of(x), cols_of(x)});
}

void CudaOps::silu_mul(TensorView gate, TensorView up) {
  gpu::silu_mul(stream_, {gpu_matrix(gate), gpu_matrix(up), rows_of(gate), cols_of(gate)});
}

void CudaOps::linear(TensorView x, const QuantView& w, TensorView out) {
  products_.multiply(x, w, out);
}

void CudaOps::linear_per_head(const LinearPerHead& args) { products_.multiply_per_head(args); }

void CudaOps::mla_absorbed(const MlaArgs& args) { attention_.absorbed(args); }

void CudaOps::mla_naive(const MlaArgs& args, const QuantView& kv_b) {
  attention_.naive(args, kv_b);
}

void CudaOps::rope(TensorView x, std::span<const int32_t> positions, const RopeTable& table) {
  const auto tokens = static_cast<int>(positions.size());
  gpu::rope(stream_, {.x = gpu_matrix(x),
                      .positions = batch_.on_gpu(positions),
                      .frequencies = frequencies_.as<float>(),
                      .amplitude = table.amplitude,
                      .tokens = tokens,
                      .rows_per_token = rows_of(x) / tokens,
                      .n_pairs = static_cast<int>(table.frequencies.size())});
}

void CudaOps::append_kv(const Batch& batch, TensorView kv, TensorView cache) {
  if (cache.dtype == DType::kF8E4M3)
    return gpu::append_fp8(stream_, {.kv = static_cast<const float*>(kv.data),
                                     .kv_stride = kv.stride,
                                     .rows_of_cache = batch_.rows_of_cache(batch),
                                     .cache = cache.data,
                                     .tokens = batch.n(),
                                     .kv_rank = kv_rank_,
                                     .rope_dim = cols_of(kv) - kv_rank_});
  check(cache.dtype == DType::kBF16, "the cache is BF16 or FP8");
  gpu::append_kv(stream_, {.kv = gpu_matrix(kv),
                           .rows_of_cache = batch_.rows_of_cache(batch),
                           .cache = static_cast<bf16*>(cache.data),
                           .cache_stride = cache.stride,
                           .tokens = batch.n(),
                           .cols = cols_of(kv)});
}

void CudaOps::route(const RouteArgs& a) {
  products_.multiply_exactly(a.x, a.w, a.logits);
  gpu::RouterArgs args = router_form(a.router);
  args.logits = gpu_matrix(a.logits);
  args.bias = static_cast<const float*>(a.bias.q.data);
  args.weights = gpu_matrix(a.out.weights);
  args.ids = static_cast<int32_t*>(a.out.ids.data);
  args.ids_stride = a.out.ids.stride;
  args.tokens = rows_of(a.x);
  gpu::route(stream_, args);
}

void CudaOps::gather_rows(TensorView x, std::span<const int32_t> rows, TensorView out) {
  gpu::gather_rows(stream_, {.x = gpu_matrix(x),
                             .rows_of_x = batch_.on_gpu(rows),
                             .out = gpu_matrix(out),
                             .rows = rows_of(out),
                             .cols = cols_of(out)});
}

}  // namespace tandem
