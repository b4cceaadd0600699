#include "engine/deepseek.h"

#include <algorithm>
#include <functional>

#include "model/rope.h"

namespace tandem {

void DeepSeek::forward(const Batch& batch, KvCache& cache) {
  check(batch.n() > 0 && batch.n() <= limits_.max_tokens, "a step has 1 to max_tokens tokens");
  const StepParts parts = parts_of(batch);
  const auto verbs = [&] { layers(batch, parts, cache); };
  const StepForm form = {buffers_.x.data, cache.layer(0).data, parts.at[0].n()};

  ops_.begin(batch);
  if (!decodes(batch))
    verbs();
  else if (ops_.run_decode(form, std::ref(verbs)))  // no copy of verbs, which allocates
    experts_.follow(parts);
}

void DeepSeek::forward(const Batch& batch, KvCache& cache, TensorView logits) {
  forward(batch, cache);
  const auto n_logits = static_cast<int64_t>(batch.logit_rows.size());
  if (n_logits > 0) ops_.to_host(buffers_.logits.rows_from(0, n_logits), logits);
}

bool DeepSeek::decodes(const Batch& batch) const {
  return std::none_of(batch.sequences.begin(), batch.sequences.end(),
                      [&](const Sequence& s) { return s.n_tokens != 1 || prefers_naive(s); });
}

// Of one part or of two in turn: then one's experts are computed elsewhere while the other has the
// backbone's device.
void DeepSeek::layers(const Batch& step, const StepParts& parts, KvCache& cache) {
  const TensorView x = rows_of(step).x;
  ops_.embed(step.tokens, w_.embed, x);
  for (int layer = 0; layer < c_.n_layers; ++layer)
    for (const Batch& part : parts) {
      if (layer > 0) end_layer(layer - 1, part);
      begin_layer(layer, part, cache.layer(layer));
    }
  for (const Batch& part : parts) end_layer(c_.n_layers - 1, part);

  if (step.logit_rows.empty()) return;
  const auto n_logits = static_cast<int64_t>(step.logit_rows.size());
  const TensorView last = buffers_.last.rows_from(0, n_logits);
  ops_.gather_rows(x, step.logit_rows, last);
  ops_.rms_norm(last, w_.final_norm, c_.norm_eps, last);
  ops_.linear(last, w_.head, buffers_.logits.rows_from(0, n_logits));
}

void DeepSeek::begin_layer(int layer, const Batch& part, TensorView cache) {
  const LayerWeights& w = w_.layers[layer];
  Activations a = rows_of(part);

  ops_.rms_norm(a.x, w.attn_norm, c_.norm_eps, a.h);
  attention(w.attn, part, cache, a);
  ops_.add(a.x, a.y);

  ops_.rms_norm(a.x, w.ffn_norm, c_.norm_eps, a.h);
  if (c_.is_moe(layer)) {
    mixture_of_experts(layer, part, a);
  } else {
    feed_forward(w.ffn, a);
  }
}

void DeepSeek::end_layer(int layer, const Batch& part) {
  const Activations a = rows_of(part);
  if (c_.is_moe(layer)) experts_.add_rest_to(layer, part.first_row(), a.y);
  ops_.add(a.x, a.y);
}

// Sequences that decode can be divided anywhere: in the middle.
StepParts DeepSeek::parts_of(const Batch& step) const {
  const size_t n = step.sequences.size();
  if (n < 2 || !decodes(step) || !experts_.wants_halves(static_cast<int>(n))) return {{step}, 1};
  const auto part = [&](size_t first, size_t count) {
    return Batch{step.tokens.subspan(first, count), step.positions.subspan(first, count),
                 step.sequences.subspan(first, count), step.logit_rows};
  };
  return {{part(0, (n + 1) / 2), part((n + 1) / 2, n / 2)}, 2};
}

// Multi-head latent attention (DeepSeek-V2 paper, section 2.1). The cache holds one vector of
// kv_rank + rope_dim a token, shared by all heads. Consecutive sequences that want the same form go
// together.
void DeepSeek::attention(const AttentionWeights& w, const Batch& part, TensorView cache,
                         Activations& a) {
  const MlaConfig& m = c_.mla;

  if (m.q_rank > 0) {
    ops_.linear(a.h, w.q_a, a.q_a);
    ops_.rms_norm(a.q_a, w.q_a_norm, c_.latent_norm_eps, a.q_a);
    ops_.linear(a.q_a, w.q_b, a.q);
  } else {
    ops_.linear(a.h, w.q, a.q);
  }
  // A head is [nope | rope].
  const TensorView q = a.q.reshape(int64_t{part.n()} * m.n_heads, m.qk_dim());
  ops_.rope(q.cols_from(m.nope_dim, m.rope_dim), part.positions, rope_);

  ops_.linear(a.h, w.kv_a, a.kv);
  const TensorView latent = a.kv.cols_from(0, m.kv_rank);
  ops_.rms_norm(latent, w.kv_a_norm, c_.latent_norm_eps, latent);
  ops_.rope(a.kv.cols_from(m.kv_rank, m.rope_dim), part.positions, rope_);
  ops_.append_kv(part, a.kv, cache);

  // The step's rows, as far as this part.
  const int64_t n = part.first_row() + part.n(), heads = n * m.n_heads;
  const TensorView all_q = buffers_.q.rows_from(0, n).reshape(heads, m.qk_dim());
  for (auto rest = part.sequences; !rest.empty();) {
    const bool naive = prefers_naive(rest.front());
    const auto end = std::find_if(rest.begin(), rest.end(),
                                  [&](const Sequence& s) { return prefers_naive(s) != naive; });
    const auto run = rest.first(end - rest.begin());
    rest = rest.subspan(run.size());
    const MlaArgs args{run,
                       all_q.cols_from(0, m.nope_dim),
                       all_q.cols_from(m.nope_dim, m.rope_dim),
                       cache,
                       m,
                       softmax_scale_,
                       buffers_.o.rows_from(0, n).reshape(heads, m.v_dim)};
    naive ? ops_.mla_naive(args, w.kv_b) : absorbed(w, args);
  }
  ops_.linear(a.o, w.o, a.y);
}

// Queries go into the space of the latents through the key rows of kv_b, outputs come back through
// its value rows. Head h of kv_b is nope_dim key rows, then v_dim value rows.
void DeepSeek::absorbed(const AttentionWeights& w, MlaArgs args) {
  const MlaConfig& m = c_.mla;
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
                        .out = buffers_.q_latent.rows_from(first, n)});
  args.q = buffers_.q_latent.rows_from(0, args.q.rows);
  args.out = buffers_.o_latent.rows_from(0, args.q.rows);
  ops_.mla_absorbed(args);
  ops_.linear_per_head({.x = buffers_.o_latent.rows_from(first, n),
                        .w = w.kv_b,
                        .n_heads = m.n_heads,
                        .first_row = m.nope_dim,
                        .rows_per_head = rows_per_head,
                        .transposed = false,
                        .out = out.rows_from(first, n)});
}

bool DeepSeek::prefers_naive(const Sequence& s) const {
  if (form_ != AttentionForm::kAuto) return form_ == AttentionForm::kNaive;
  return naive_is_cheaper(c_.mla, s.n_tokens, s.kv_length);
}

void DeepSeek::feed_forward(const FfnWeights& w, Activations& a) {
  const TensorView gate = a.gate.cols_from(0, w.gate.q.rows);
  const TensorView up = a.up.cols_from(0, w.up.q.rows);
  ops_.linear(a.h, w.gate, gate);
  ops_.linear(a.h, w.up, up);
  ops_.silu_mul(gate, up);
  ops_.linear(gate, w.down, a.y);
}

void DeepSeek::mixture_of_experts(int layer, const Batch& part, Activations& a) {
  const LayerWeights& w = w_.layers[layer];
  ops_.route({a.h, w.router, w.router_bias, c_.router, a.scores, a.routing});

  experts_.submit({layer, a.h, a.routing, part.first_row()});
  if (c_.n_shared_experts > 0) {
    feed_forward(w.ffn, a);  // overlaps with the routed experts
  } else {
    ops_.clear(a.y);
  }
  experts_.add_to(a.y);
}

namespace {

// Every scratch matrix once: visit(view, rows, cols, dtype).
template <class Visit>
void for_each_activation(Activations& a, const ModelConfig& c, DeepSeek::Limits limits,
                         Visit visit) {
  const MlaConfig& m = c.mla;
  const int64_t n = limits.max_tokens, heads = m.n_heads;
  const int64_t ffn = std::max(c.dense_dim, c.shared_dim());
  for (TensorView* view : {&a.x, &a.h, &a.y}) visit(*view, n, c.dim, DType::kF32);
  visit(a.q_a, n, m.q_rank, DType::kF32);
  visit(a.q, n, heads * m.qk_dim(), DType::kF32);
  visit(a.kv, n, m.cache_dim(), DType::kF32);
  visit(a.q_latent, n * heads, m.kv_rank, DType::kF32);
  visit(a.o_latent, n * heads, m.kv_rank, DType::kF32);
  visit(a.o, n, heads * m.v_dim, DType::kF32);
  visit(a.gate, n, ffn, DType::kF32);
  visit(a.up, n, ffn, DType::kF32);
  visit(a.scores, n, c.router.n_experts, DType::kF32);
  visit(a.routing.ids, n, c.router.n_active, DType::kI32);
  visit(a.routing.weights, n, c.router.n_active, DType::kF32);
  visit(a.last, limits.max_logits, c.dim, DType::kF32);
  visit(a.logits, limits.max_logits, c.vocab, DType::kF32);
}

}  // namespace

DeepSeek::DeepSeek(const ModelConfig& config, const ModelWeights& weights, Ops& ops,
                   RoutedExperts& experts, Limits limits, AttentionForm form)
    : c_(config),
      w_(weights),
      ops_(ops),
      experts_(experts),
      limits_(limits),
      form_(form),
      frequencies_(rope_frequencies(config.rope, config.mla.rope_dim)),
      rope_{frequencies_, rope_amplitude(config.rope)},
      softmax_scale_(softmax_scale(config)) {
  arena_ = Arena::holding([&](auto visit) { for_each_activation(buffers_, config, limits, visit); },
                          [&](int64_t bytes) { return ops.allocate(bytes); });
}

int64_t DeepSeek::bytes_for(const ModelConfig& config, Limits limits) {
  Activations unused;
  int64_t bytes = 0;
  for_each_activation(unused, config, limits,
                      [&](TensorView&, int64_t rows, int64_t cols, DType dtype) {
                        bytes += Arena::padded_bytes(rows * cols * bits_of(dtype) / 8);
                      });
  return bytes;
}

// [part.n(), ..]
Activations DeepSeek::rows_of(const Batch& part) const {
  Activations a = buffers_;
  for (TensorView* t : {&a.x, &a.h, &a.y, &a.q_a, &a.q, &a.kv, &a.o, &a.gate, &a.up, &a.scores,
                        &a.routing.ids, &a.routing.weights})
    *t = t->rows_from(part.first_row(), part.n());
  return a;
}

}  // namespace tandem
