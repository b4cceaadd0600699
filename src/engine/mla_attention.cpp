#include "engine/mla_attention.h"

#include <algorithm>

#include "model/rope.h"

namespace tandem {

void MlaAttention::forward(const AttentionWeights& w, const Batch& batch, TensorView h,
                           TensorView cache, TensorView out) {
  if (mla_.n_heads == 0) return ops_.clear(out);
  const MlaConfig& m = mla_;
  project(w, batch, h, cache);

  // The matrices of MlaArgs start with the first row of the step.
  const int64_t n = batch.first_row() + batch.n(), heads = n * m.n_heads;
  const TensorView q = scratch_.q.rows_from(0, n).reshape(heads, m.qk_dim());
  // Consecutive sequences that use the same form share one call.
  for (auto rest = batch.sequences; !rest.empty();) {
    const bool naive = prefers_naive(rest.front());
    const auto end = std::find_if(rest.begin(), rest.end(),
                                  [&](const Sequence& s) { return prefers_naive(s) != naive; });
    const auto run = rest.first(end - rest.begin());
    rest = rest.subspan(run.size());
    const MlaArgs args{run,
                       q.cols_from(0, m.nope_dim),
                       q.cols_from(m.nope_dim, m.rope_dim),
                       cache,
                       m,
                       softmax_scale_,
                       scratch_.o.rows_from(0, n).reshape(heads, m.v_dim)};
    naive ? ops_.mla_naive(args, w.kv_b) : absorbed(w, args);
  }
  ops_.linear(scratch_.o.rows_from(batch.first_row(), batch.n()), w.o, out);
}

// Computes queries, and adds latents and rope keys to the cache.
void MlaAttention::project(const AttentionWeights& w, const Batch& batch, TensorView h,
                           TensorView cache) {
  const MlaConfig& m = mla_;
  const auto rows = [&](TensorView t) { return t.rows_from(batch.first_row(), batch.n()); };
  const TensorView q = rows(scratch_.q), kv = rows(scratch_.kv);

  if (m.q_rank > 0) {
    const TensorView q_a = rows(scratch_.q_a);
    ops_.linear_pair(h, w.q_a, q_a, w.kv_a, kv);
    ops_.norm_linear(q_a, w.q_a_norm, c_.latent_norm_eps, w.q_b, q);
  } else {
    ops_.linear_pair(h, w.q, q, w.kv_a, kv);
  }
  // The columns of a head are [nope | rope].
  const TensorView heads = q.reshape(int64_t{batch.n()} * m.n_heads, m.qk_dim());
  ops_.rotate_and_append({.batch = batch,
                          .q_rope = heads.cols_from(m.nope_dim, m.rope_dim),
                          .kv = kv,
                          .latent_gain = w.kv_a_norm,
                          .eps = c_.latent_norm_eps,
                          .rope = rope_,
                          .cache = cache});
}

// The key rows of kv_b map queries into the latent space, and its value rows map outputs back. Head
// h of kv_b is nope_dim key rows, then v_dim value rows.
void MlaAttention::absorbed(const AttentionWeights& w, MlaArgs args) {
  const MlaConfig& m = mla_;
  const int64_t first = int64_t{args.sequences.front().first_token} * m.n_heads;
  const Sequence& last = args.sequences.back();
  const int64_t n = int64_t{last.first_token + last.n_tokens} * m.n_heads - first;
  const int rows_per_head = m.nope_dim + m.v_dim;

  const TensorView out = args.out;
  ops_.linear_per_head({.x = args.q.rows_from(first, n),
                        .w = w.kv_b,
                        .n_heads = m.n_heads,
                        .first_row = 0,
                        .rows_per_head = rows_per_head,
                        .transposed = true,
                        .out = scratch_.q_latent.rows_from(first, n)});
  args.q = scratch_.q_latent.rows_from(0, args.q.rows);
  args.out = scratch_.o_latent.rows_from(0, args.q.rows);
  ops_.attend_and_restore(args, {.x = scratch_.o_latent.rows_from(first, n),
                                 .w = w.kv_b,
                                 .n_heads = m.n_heads,
                                 .first_row = m.nope_dim,
                                 .rows_per_head = rows_per_head,
                                 .transposed = false,
                                 .out = out.rows_from(first, n)});
}

bool MlaAttention::prefers_naive(const Sequence& s) const {
  if (form_ != AttentionForm::kAuto) return form_ == AttentionForm::kNaive;
  return naive_is_cheaper(c_.mla, s.n_tokens, s.kv_length);
}

bool MlaAttention::is_uniform(const Batch& batch) const {
  return std::all_of(batch.sequences.begin(), batch.sequences.end(), [&](const Sequence& s) {
    return s.n_tokens <= 1 + kMaxDraftTokens && !prefers_naive(s);
  });
}

template <class Visit>
void MlaAttention::for_each_matrix(Scratch& s, const MlaConfig& m, int max_tokens, Visit visit) {
  const int64_t n = max_tokens, heads = m.n_heads;
  visit(s.q_a, n, m.q_rank, DType::kF32);
  visit(s.q, n, heads * m.qk_dim(), DType::kF32);
  visit(s.kv, n, m.cache_dim(), DType::kF32);
  visit(s.q_latent, n * heads, m.kv_rank, DType::kF32);
  visit(s.o_latent, n * heads, m.kv_rank, DType::kF32);
  visit(s.o, n, heads * m.v_dim, DType::kF32);
}

MlaAttention::MlaAttention(const ModelConfig& config, int n_heads, Ops& ops, Device& device,
                           int max_tokens, AttentionForm form)
    : c_(config),
      mla_([&] {
        MlaConfig mla = config.mla;
        mla.n_heads = n_heads;
        return mla;
      }()),
      ops_(ops),
      form_(form),
      frequencies_(rope_frequencies(config.rope, config.mla.rope_dim)),
      rope_{frequencies_, rope_amplitude(config.rope)},
      softmax_scale_(softmax_scale(config)) {
  arena_ = Arena::holding([&](auto visit) { for_each_matrix(scratch_, mla_, max_tokens, visit); },
                          [&](int64_t bytes) { return device.allocate(bytes); });
}

int64_t MlaAttention::bytes_for(const ModelConfig& config, int max_tokens) {
  Scratch unused;
  return Arena::bytes_of(
      [&](auto visit) { for_each_matrix(unused, config.mla, max_tokens, visit); });
}

}  // namespace tandem
