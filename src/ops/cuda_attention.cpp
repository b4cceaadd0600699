#include "ops/cuda_attention.h"

#include <algorithm>

#include "gpu_kernels/attention/attention.h"
#include "gpu_kernels/products/products.h"
#include "model/kv_layout.h"
#include "ops/cuda_weights.h"

namespace tandem {
namespace {

static_assert(gpu::kPageTokens == kPageSize && gpu::kFp8TokenBytes == kFp8TokenBytes);

constexpr int kPlainTokens = 32;               // tokens projected at a time
constexpr int64_t kRestoredBytes = 256 << 20;  // keys and values

bool takes_absorbed(const MlaConfig& m) {
  return m.kv_rank <= gpu::kMaxKvRank && m.cache_dim() <= gpu::kMaxCacheDim && m.kv_rank % 2 == 0 &&
         m.rope_dim % 2 == 0;
}

bool takes_naive(const MlaConfig& m) {
  return takes_absorbed(m) && (m.nope_dim + 7) / 8 * 8 + m.rope_dim <= gpu::kMaxQkDim &&
         m.v_dim <= gpu::kMaxVDim && m.nope_dim % 2 == 0 && m.v_dim % 2 == 0;
}

// (token, head) rows of partial outputs: 64 for each multiprocessor where the context is divided,
// and at least one for every row.
int64_t partial_rows(const MlaConfig& m, CudaLimits limits) {
  return std::max<int64_t>(int64_t{limits.n_multiprocessors} * 64,
                           int64_t{limits.max_tokens} * m.n_heads);
}

int64_t bytes_of_restored(const MlaConfig& m) {  // for a token and head
  return (m.nope_dim + m.v_dim) * int64_t{sizeof(bf16)};
}

// (token, head) pairs whose keys and values are restored at a time.
int64_t restored_pairs(const MlaConfig& m, CudaLimits limits) {
  const int64_t all = round_up(limits.context, gpu::kPrefillKeys) * m.n_heads;
  const int64_t fit = kRestoredBytes / std::max<int64_t>(bytes_of_restored(m), 1);
  return std::min(all, std::max<int64_t>(fit, gpu::kPrefillKeys));
}

struct Scratch {
  int64_t partial, lse, latents, restored, plain;  // bytes
  int64_t sum() const { return partial + lse + latents + restored + plain; }
};

Scratch scratch_for(const MlaConfig& m, CudaLimits limits) {
  const int64_t rows = partial_rows(m, limits), f32 = sizeof(float), b16 = sizeof(bf16);
  return {.partial = rows * gpu::kMaxKvRank * f32,
          .lse = rows * f32,
          .latents = limits.context * gpu::product_stride(m.kv_rank) * b16,
          .restored = bytes_of_restored(m) * restored_pairs(m, limits),
          .plain = 2 * int64_t{kPlainTokens} * m.n_heads * m.kv_rank * f32};
}

gpu::LatentCache latent_cache(const MlaArgs& a) {
  return {.data = a.cache.data,
          .stride = a.cache.stride,
          .kv_rank = a.mla.kv_rank,
          .rope_dim = a.mla.rope_dim,
          .fp8 = a.cache.dtype == DType::kF8E4M3};
}

float* floats(TensorView t) { return static_cast<float*>(t.data); }

}  // namespace

CudaAttention::CudaAttention(const MlaConfig& m, CudaLimits limits, const CudaBatch& batch,
                             CudaProducts& products, gpu::Stream& stream)
    : limits_(limits),
      batch_(batch),
      products_(products),
      stream_(stream),
      partial_rows_(partial_rows(m, limits)),
      restored_pairs_(restored_pairs(m, limits)) {
  const Scratch bytes = scratch_for(m, limits);
  partial_ = gpu::Buffer(bytes.partial, gpu::Site::kDevice);
  partial_lse_ = gpu::Buffer(bytes.lse, gpu::Site::kDevice);
  latents_ = gpu::Buffer(bytes.latents, gpu::Site::kDevice);
  restored_ = gpu::Buffer(bytes.restored, gpu::Site::kDevice);
  plain_ = gpu::Buffer(bytes.plain, gpu::Site::kDevice);
}

void CudaAttention::require_takes(const MlaConfig& m) {
  require(m.kv_rank <= gpu::kMaxPlainRank && m.cache_dim() <= gpu::kMaxPlainDim,
          "kv_lora_rank {} and qk_rope_head_dim {}: attention on a GPU supports at most {} and a "
          "sum of at most {}; use --device cpu",
          m.kv_rank, m.rope_dim, gpu::kMaxPlainRank, gpu::kMaxPlainDim);
}

int64_t CudaAttention::bytes_for(const MlaConfig& mla, CudaLimits limits) {
  return scratch_for(mla, limits).sum();
}

// The plain kernels cannot read FP8.
void CudaAttention::require_fp8_cache(const MlaConfig& m, const QuantView& kv_b) {
  require(
      takes_naive(m) && m.rope_dim <= gpu::kMaxCacheDim - gpu::kMaxKvRank &&
          for_tensor_cores(gpu_weight(kv_b), kTileBlockCols),
      "--kv fp8: attention of this model (kv_lora_rank {}, qk_nope_head_dim {}, "
      "qk_rope_head_dim {}, v_head_dim {}) needs the dimensions of DeepSeek and weights in BF16 "
      "or FP8; use --kv bf16",
      m.kv_rank, m.nope_dim, m.rope_dim, m.v_dim);
}

void CudaAttention::absorbed(const MlaArgs& a) {
  if (takes_absorbed(a.mla)) return gpu::mla_decode(stream_, decode_args(a));
  const Sequence &first = a.sequences.front(), &last = a.sequences.back();
  const int n_tokens = last.first_token + last.n_tokens - first.first_token;
  const auto rows = [&](TensorView t) {
    return t.rows_from(int64_t{first.first_token} * a.mla.n_heads,
                       int64_t{n_tokens} * a.mla.n_heads);
  };
  absorbed_plainly(a, first.first_token, n_tokens, rows(a.q), rows(a.q_rope), rows(a.out));
}

// The product joins the parts of a divided context where it can.
void CudaAttention::absorbed(const MlaArgs& a, const LinearPerHead& restore) {
  if (!takes_absorbed(a.mla) || !CudaProducts::joins_parts(restore)) {
    absorbed(a);
    return products_.multiply_per_head(restore);
  }
  gpu::MlaDecodeArgs args = decode_args(a);
  args.combines = false;
  gpu::mla_decode(stream_, args);
  const int64_t first_row = (floats(restore.x) - floats(a.out)) / a.out.stride;
  products_.multiply_per_head(restore, attention_parts(args, first_row));
}

gpu::MlaDecodeArgs CudaAttention::decode_args(const MlaArgs& a) const {
  const gpu::PagedSequences sequences = batch_.sequences(a.sequences);
  const auto max_splits = static_cast<int>(partial_rows_ / a.q.rows);
  return {.q = floats(a.q),
          .q_rope = floats(a.q_rope),
          .cache = latent_cache(a),
          .sequences = sequences,
          .partial = partial_.as<float>(),
          .partial_lse = partial_lse_.as<float>(),
          .out = floats(a.out),
          .q_stride = a.q.stride,
          .q_rope_stride = a.q_rope.stride,
          .out_stride = a.out.stride,
          .n_rows = a.q.rows,
          .n_heads = a.mla.n_heads,
          .n_splits = gpu::mla_decode_splits(sequences.n, sequences.max_tokens, a.mla.n_heads,
                                             limits_.n_multiprocessors, max_splits),
          .softmax_scale = a.softmax_scale};
}

void CudaAttention::naive(const MlaArgs& a, const QuantView& kv_b) {
  const bool restores = takes_naive(a.mla) && for_tensor_cores(gpu_weight(kv_b), kTileBlockCols);
  for (const Sequence& s : a.sequences)
    restores ? restore_and_attend(a, s, kv_b) : naive_through_latents(a, s, kv_b);
}

void CudaAttention::restore_and_attend(const MlaArgs& a, const Sequence& s, const QuantView& kv_b) {
  const int64_t first = int64_t{s.first_token} * a.mla.n_heads;
  const int64_t rows = int64_t{s.n_tokens} * a.mla.n_heads;
  const auto part = [&](TensorView t) { return t.rows_from(first, rows); };
  gpu::mla_prefill(stream_,
                   {.q = floats(part(a.q)),
                    .q_rope = floats(part(a.q_rope)),
                    .cache = latent_cache(a),
                    .pages = batch_.sequences({&s, 1}).pages,
                    .kv_b = gpu_weight(kv_b),
                    .latents = latents_.as<bf16>(),
                    .restored = restored_.as<bf16>(),
                    .carried = partial_.as<float>(),
                    .out = floats(part(a.out)),
                    .q_stride = a.q.stride,
                    .q_rope_stride = a.q_rope.stride,
                    .out_stride = a.out.stride,
                    .n_tokens = s.n_tokens,
                    .kv_length = s.kv_length,
                    .n_heads = a.mla.n_heads,
                    .nope_dim = a.mla.nope_dim,
                    .v_dim = a.mla.v_dim,
                    .plan = gpu::mla_prefill_plan({.n_tokens = s.n_tokens,
                                                   .kv_length = s.kv_length,
                                                   .n_heads = a.mla.n_heads,
                                                   .capacity = restored_pairs_,
                                                   .n_multiprocessors = limits_.n_multiprocessors}),
                    .softmax_scale = a.softmax_scale});
}

// Computes the same in another order: queries are mapped to the latent space, outputs back.
void CudaAttention::naive_through_latents(const MlaArgs& a, const Sequence& s,
                                          const QuantView& kv_b) {
  const MlaConfig& m = a.mla;
  const int64_t all = int64_t{kPlainTokens} * m.n_heads;
  const TensorView scratch = {plain_.as<float>(), 2 * all, m.kv_rank, m.kv_rank, DType::kF32};
  const auto project = [&](TensorView x, int first_row, bool transposed, TensorView out) {
    products_.multiply_per_head({.x = x,
                                 .w = kv_b,
                                 .n_heads = m.n_heads,
                                 .first_row = first_row,
                                 .rows_per_head = m.nope_dim + m.v_dim,
                                 .transposed = transposed,
                                 .out = out});
  };
  for (int done = 0; done < s.n_tokens; done += kPlainTokens) {
    const int token = s.first_token + done, n = std::min(kPlainTokens, s.n_tokens - done);
    const int64_t first = int64_t{token} * m.n_heads, rows = int64_t{n} * m.n_heads;
    const TensorView q = scratch.rows_from(0, rows), out = scratch.rows_from(all, rows);
    project(a.q.rows_from(first, rows), 0, true, q);
    absorbed_plainly(a, token, n, q, a.q_rope.rows_from(first, rows), out);
    project(out, m.nope_dim, false, a.out.rows_from(first, rows));
  }
}

// All matrices start at the first token.
void CudaAttention::absorbed_plainly(const MlaArgs& a, int first_token, int n_tokens, TensorView q,
                                     TensorView q_rope, TensorView out) {
  gpu::plain_attention(stream_, {.q = gpu_matrix(q),
                                 .q_rope = gpu_matrix(q_rope),
                                 .cache = static_cast<const bf16*>(a.cache.data),
                                 .cache_stride = a.cache.stride,
                                 .at = batch_.pages(),
                                 .out = gpu_matrix(out),
                                 .first_token = first_token,
                                 .n_tokens = n_tokens,
                                 .n_heads = a.mla.n_heads,
                                 .rank = a.mla.kv_rank,
                                 .rope_dim = a.mla.rope_dim,
                                 .scale = a.softmax_scale});
}

}  // namespace tandem
