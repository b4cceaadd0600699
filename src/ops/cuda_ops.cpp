#include "ops/cuda_ops.h"

#include <algorithm>
#include <numeric>

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

// Where replica r's rows begin.
int64_t first_row_of(std::span<const int64_t> n_rows, int r) {
  return std::accumulate(n_rows.begin(), n_rows.begin() + r, int64_t{0});
}

bool are_equal(std::span<const int64_t> n_rows) {
  return std::all_of(n_rows.begin(), n_rows.end(), [&](int64_t n) { return n == n_rows[0]; });
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
  CudaProducts::require_takes(c);
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

void CudaOps::all_reduce(TensorView x) {
  if (calls_) return calls_->all_reduce(x);
  if (!ranks_) return;
  check(x.stride == x.cols, "the ranks add dense matrices");
  ranks_->all_reduce(stream_, x.row<float>(0), x.rows * x.cols);
}

// The GPU of the stage before is the first of two.
void CudaOps::send(TensorView x) {
  if (calls_) return calls_->send(x);
  check(x.stride == x.cols, "rows that travel are dense");
  stage_after_->broadcast(stream_, x.row<float>(0), x.rows * x.cols, 0);
}

void CudaOps::receive(TensorView x) {
  if (calls_) return calls_->receive(x);
  check(x.stride == x.cols, "rows that travel are dense");
  stage_before_->broadcast(stream_, x.row<float>(0), x.rows * x.cols, 0);
}

// The sum of columns that one rank has and that are 0 elsewhere. An all-gather would move half of
// the bytes, but rows of columns that lie apart, so it would need copies before and after.
void CudaOps::all_gather_cols(TensorView x, std::span<const Slice> slices) {
  if (calls_) return calls_->all_gather_cols(x, slices);
  if (!ranks_) return;
  for (int rank = 0; rank < std::ssize(slices); ++rank)
    if (rank != ranks_->rank() && slices[rank].n > 0)
      clear(x.cols_from(slices[rank].first, slices[rank].n));
  all_reduce(x);
}

// NCCL gathers and scatters equal pieces only. The others are sent by each rank in turn, and added
// up whole.
void CudaOps::gather_replicas(TensorView mine, std::span<const int64_t> n_rows, TensorView all) {
  const int rank = like_ranks_->rank();
  const auto rows_of_replica = [&](int r) {
    return all.rows_from(first_row_of(n_rows, r), n_rows[r]);
  };
  if (mine.rows > 0)
    stream_.copy(mine.data, mine.rows * mine.row_bytes(), rows_of_replica(rank).data);
  if (are_equal(n_rows)) return like_ranks_->all_gather(stream_, all.data, n_rows[0] * all.cols);
  for (int r = 0; r < std::ssize(n_rows); ++r)
    if (n_rows[r] > 0)
      like_ranks_->broadcast(stream_, rows_of_replica(r).row<float>(0), n_rows[r] * all.cols, r);
}

void CudaOps::scatter_replicas(TensorView all, std::span<const int64_t> n_rows, TensorView mine) {
  if (are_equal(n_rows))
    like_ranks_->reduce_scatter(stream_, all.row<float>(0), n_rows[0] * all.cols);
  else
    like_ranks_->all_reduce(stream_, all.row<float>(0), all.rows * all.cols);
  const int64_t first = first_row_of(n_rows, like_ranks_->rank());
  if (mine.rows > 0) stream_.copy(all.row_data(first), mine.rows * mine.row_bytes(), mine.data);
}

void CudaOps::exchange_replicas(TensorView all, std::span<const int64_t> n_rows, TensorView mine,
                                std::span<const Slice> slices, TensorView scratch) {
  n_sent_.clear();
  n_received_.clear();
  for (const int64_t n : n_rows) n_sent_.push_back(n * all.cols);
  for (const Slice& s : slices) n_received_.push_back(mine.rows * s.n);
  like_ranks_->all_to_all(
      stream_,
      {.sent = all.data, .n_sent = n_sent_, .received = scratch.data, .n_received = n_received_});
  auto* piece = static_cast<float*>(scratch.data);
  for (const Slice& s : slices) {
    if (mine.rows == 0 || s.n == 0) continue;
    const TensorView to = mine.cols_from(s.first, s.n);
    clear(to);
    add(to, {piece, mine.rows, s.n, s.n});
    piece += mine.rows * s.n;
  }
}

void CudaOps::add_rms_norm(TensorView x, TensorView delta, const QuantView& gain, float eps,
                           TensorView out) {
  gpu::rms_norm(stream_, {.x = gpu_matrix(x),
                          .gain = static_cast<const float*>(gain.q.data),
                          .out = gpu_matrix(out),
                          .rows = rows_of(x),
                          .dim = cols_of(x),
                          .eps = eps,
                          .delta = gpu_matrix(delta)});
}

void CudaOps::norm_linear(TensorView x, const QuantView& gain, float eps, const QuantView& w,
                          TensorView out) {
  if (!products_.multiply_normalised(x, gain, eps, w, out)) Ops::norm_linear(x, gain, eps, w, out);
}

void CudaOps::linear_pair(TensorView x, const QuantView& w_0, TensorView out_0,
                          const QuantView& w_1, TensorView out_1) {
  if (!products_.multiply_pair(x, w_0, out_0, w_1, out_1))
    Ops::linear_pair(x, w_0, out_0, w_1, out_1);
}

void CudaOps::gated_linear(TensorView x, const QuantView& gate, const QuantView& up, TensorView out,
                           TensorView scratch) {
  if (!products_.multiply_gated(x, gate, up, out)) Ops::gated_linear(x, gate, up, out, scratch);
}

void CudaOps::attend_and_restore(const MlaArgs& attend, const LinearPerHead& restore) {
  attention_.absorbed(attend, restore);
}

void CudaOps::rotate_and_append(const AppendArgs& a) {
  const bool fp8 = a.cache.dtype == DType::kF8E4M3;
  check(fp8 || a.cache.dtype == DType::kBF16, "the cache is BF16 or FP8");
  gpu::rotate_and_append(stream_, {.q_rope = gpu_matrix(a.q_rope),
                                   .kv = gpu_matrix(a.kv),
                                   .gain = static_cast<const float*>(a.latent_gain.q.data),
                                   .eps = a.eps,
                                   .positions = batch_.on_gpu(a.batch.positions),
                                   .frequencies = frequencies_.as<float>(),
                                   .rows_of_cache = batch_.rows_of_cache(a.batch),
                                   .cache = a.cache.data,
                                   .cache_stride = a.cache.stride,
                                   .fp8 = fp8,
                                   .amplitude = a.rope.amplitude,
                                   .tokens = a.batch.n(),
                                   .n_heads = rows_of(a.q_rope) / a.batch.n(),
                                   .kv_rank = kv_rank_,
                                   .rope_dim = cols_of(a.q_rope)});
}

void CudaOps::route(const RouteArgs& a) {
  gpu::RouterArgs args = router_form(a.router);
  args.x = static_cast<const float*>(a.x.data);
  args.x_stride = a.x.stride;
  args.w = gpu_weight(a.w);
  args.workspace = products_.workspace();
  args.n_multiprocessors = products_.n_multiprocessors();
  args.logits = gpu_matrix(a.logits);
  args.bias = static_cast<const float*>(a.bias.q.data);
  args.weights = gpu_matrix(a.out.weights);
  args.ids = static_cast<int32_t*>(a.out.ids.data);
  args.ids_stride = a.out.ids.stride;
  args.uses = a.uses;
  if (const SimulatedRows& s = a.simulated; s.ids.rows > 0)
    args.simulated = {.ids = s.ids.row<int32_t>(0),
                      .n_rows = s.ids.rows,
                      .varies = s.varies,
                      .positions = batch_.on_gpu(s.positions),
                      .first_token = s.first_token,
                      .token_stride = s.token_stride};
  args.tokens = rows_of(a.x);
  gpu::route(stream_, args);
  if (calls_) calls_->route(a.out);
}

void CudaOps::gather_rows(TensorView x, std::span<const int32_t> rows, TensorView out) {
  gpu::gather_rows(stream_, {.x = gpu_matrix(x),
                             .rows_of_x = batch_.on_gpu(rows),
                             .out = gpu_matrix(out),
                             .rows = rows_of(out),
                             .cols = cols_of(out)});
}

}  // namespace tandem
