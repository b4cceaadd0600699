#include "engine/deepseek.h"

#include <algorithm>
#include <cstring>

namespace tandem {

void DeepSeek::embed(const Batch& step) {
  if (share_.is_first_stage())
    ops_.embed(step.tokens, w_.embed, rows_of(step).x);
  else
    receive(step);
}

Pass DeepSeek::layers(LayerRange range, const Batch& batch, KvCache& cache, PassMemory&) {
  const Scratch s = rows_of(batch);

  for (int layer = range.first; layer < range.end; ++layer) {
    const LayerWeights& w = w_.layers[layer];

    if (layer == range.first)
      ops_.rms_norm(s.x, w.attn_norm, c_.norm_eps, s.h);
    else  // the last layer's y is added
      ops_.add_rms_norm(s.x, s.y, w.attn_norm, c_.norm_eps, s.h);
    attention_.forward(w.attn, batch, s.h, cache.layer(layer), s.y);
    ops_.all_reduce(s.y);  // each rank has some of the heads

    ops_.add_rms_norm(s.x, s.y, w.ffn_norm, c_.norm_eps, s.h);
    if (c_.is_moe(layer)) {
      const Ticket routed = route(layer, batch, s);
      feed_forward(w.ffn, s);  // the shared expert, beside the routed ones
      if (experts_.waits(routed)) co_await kOtherPass;
      if (experts_.serve(routed)) co_await kOtherPass;
      experts_.add_to(routed, s.y);
    } else if (share_.by_replicas.dense) {
      divided_feed_forward(layer, batch.micro_batch, s.h, s.y);
    } else {
      feed_forward(w.ffn, s);
    }
    ops_.all_reduce(s.y);  // each rank has some of the columns and experts
  }
  ops_.add(s.x, s.y);
}

void DeepSeek::head(const Batch& step, int64_t first_row) {
  if (!share_.is_last_stage(c_)) {
    if (step.n() > 0) ops_.send(rows_of(step).x);
    return;
  }
  const auto n = static_cast<int64_t>(step.logit_rows.size());
  const TensorView last = scratch_.last.rows_from(0, n);
  if (n > 0) {
    ops_.gather_rows(scratch_.x.rows_from(0, step.n()), step.logit_rows, last);
    ops_.rms_norm(last, w_.final_norm, c_.norm_eps, last);
  }
  project_to_vocabulary(last, w_.head, first_row);
}

// Computes the logits of rows [n, dim].
void DeepSeek::project_to_vocabulary(TensorView rows, const QuantView& head, int64_t first_row) {
  const TensorView logits = scratch_.logits.rows_from(first_row, rows.rows);
  if (share_.by_replicas.head) divided_logits(rows, head, logits);
  if (rows.rows == 0) return;
  const auto [first, n] = share_.head();
  if (n > 0 && !share_.by_replicas.head) ops_.linear(rows, head, logits.cols_from(first, n));
  ops_.all_gather_cols(logits, share_.vocab);
}

Ticket DeepSeek::route(int layer, const Batch& batch, const Scratch& s) {
  const LayerWeights& w = w_.layers[layer];
  const TensorView uses = scratch_.uses.rows_from(layer, 1);
  ops_.route({s.h, w.router, w.router_bias, c_.router, s.scores, s.routing,
              counts_experts_ ? static_cast<uint32_t*>(uses.data) : nullptr,
              simulated_rows(layer, batch)});
  return experts_.submit({.layer = layer,
                          .x = s.h,
                          .routing = s.routing,
                          .first_row = batch.first_row(),
                          .micro_batch = batch.micro_batch});
}

// The tokens of all replicas take turns, so that together they are as balanced as those of one.
SimulatedRows DeepSeek::simulated_rows(int layer, const Batch& batch) const {
  if (!c_.router.simulated) return {};
  const SimulatedChoices& s = *c_.router.simulated;
  const auto [first_row, n_rows] = s.layers[layer];
  int32_t* const ids = reinterpret_cast<int32_t*>(simulated_.data()) + first_row * s.n_active;
  return {.ids = {ids, n_rows, s.n_active, s.n_active, DType::kI32},
          .varies = s.varies,
          .positions = batch.positions,
          .first_token = int64_t{batch.first_row()} * n_replicas_ + replica_,
          .token_stride = n_replicas_};
}

// y = ffn(h); 0 if there is none here.
void DeepSeek::feed_forward(const FfnWeights& w, const Scratch& s) {
  if (w.down.empty()) return ops_.clear(s.y);
  const TensorView gate = s.gate.cols_from(0, w.gate.q.rows);
  const TensorView up = s.up.cols_from(0, w.up.q.rows);
  ops_.gated_linear(s.h, w.gate, w.up, gate, up);
  ops_.linear(gate, w.down, s.y);
}

template <class Visit>
void DeepSeek::for_each_matrix(Scratch& s, const ModelConfig& c, StepLimits limits,
                               const BackboneShare& share, Visit visit) {
  const int64_t n = limits.max_tokens, ffn = std::max(c.dense_dim, c.shared_dim());
  for (TensorView* view : {&s.x, &s.h, &s.y}) visit(*view, n, c.dim, DType::kF32);
  visit(s.gate, n, ffn, DType::kF32);
  visit(s.up, n, ffn, DType::kF32);
  visit(s.scores, n, c.router.n_experts, DType::kF32);
  visit(s.routing.ids, n, c.router.n_active, DType::kI32);
  visit(s.routing.weights, n, c.router.n_active, DType::kF32);
  visit(s.last, limits.max_logits, c.dim, DType::kF32);
  visit(s.logits, limits.max_logits, c.vocab, DType::kF32);
  const int64_t n_mtp = c.n_used_mtp_layers > 0 ? n : 0;
  visit(s.hidden, n_mtp, c.dim, DType::kF32);
  visit(s.joined, n_mtp, int64_t{2} * c.dim, DType::kF32);
  visit(s.uses, c.n_all_layers(), c.router.n_experts, DType::kI32);
  const bool divided_head = share.by_replicas.head;
  const int64_t n_replicas = std::max<int64_t>(1, std::ssize(share.vocab_of_replicas));
  const int64_t n_logits = divided_head ? std::max<int64_t>(limits.max_logits, n_replicas) : 0;
  visit(s.all_h, share.by_replicas.dense ? n : n_logits, c.dim, DType::kF32);
  visit(s.all_y, share.by_replicas.dense ? n : 0, c.dim, DType::kF32);
  visit(s.all_logits, n_logits, share.head().n, DType::kF32);
  visit(s.exchanged, n_logits / n_replicas, share.vocab[share.rank].n, DType::kF32);
}

DeepSeek::DeepSeek(const ModelParts& parts, StepLimits limits, AttentionForm form)
    : c_(parts.config),
      w_(parts.weights),
      ops_(parts.ops),
      experts_(parts.experts),
      replica_(parts.replica),
      n_replicas_(parts.n_replicas),
      share_(parts.weights.share_of(parts.config)),
      attention_(parts.config, static_cast<int>(share_.heads.n), parts.ops, parts.device,
                 limits.max_tokens, form),
      limits_(limits) {
  arena_ = Arena::holding(
      [&](auto visit) { for_each_matrix(scratch_, parts.config, limits, share_, visit); },
      [&](int64_t bytes) { return parts.device.allocate(bytes); });
  if (c_.router.simulated) upload_simulated(parts.device);
}

void DeepSeek::upload_simulated(Device& device) {
  const auto ids = std::as_bytes(std::span(c_.router.simulated->ids));
  const auto bytes = static_cast<int64_t>(ids.size());
  simulated_ = device.allocate(bytes);
  const Buffer staged = device.allocate_on_host(bytes);
  const bool is_host = staged.bytes() == 0;
  std::memcpy(is_host ? simulated_.data() : staged.data(), ids.data(), ids.size());
  if (is_host) return;
  device.copy(staged.data(), bytes, simulated_.data());
  device.wait();
}

void DeepSeek::count_experts() {
  TensorView zeros = scratch_.uses;
  zeros.dtype = DType::kF32;  // 0 has the same bits in both types
  ops_.clear(zeros);
  counts_experts_ = true;
}

LayerRange DeepSeek::main_layers() const {
  const auto [first, n] = share_.layers;
  return {static_cast<int>(first), n == 0 ? c_.n_layers : static_cast<int>(first + n)};
}

int64_t DeepSeek::bytes_for(const ModelConfig& config, StepLimits limits,
                            const BackboneShare& share) {
  Scratch unused;
  return MlaAttention::bytes_for(config, limits.max_tokens) + Arena::bytes_of([&](auto visit) {
           for_each_matrix(unused, config, limits, share, visit);
         });
}

// The first batch.n() rows of every matrix, [batch.n(), ..].
DeepSeek::Scratch DeepSeek::rows_of(const Batch& batch) const {
  Scratch s = scratch_;
  for (TensorView* t :
       {&s.x, &s.h, &s.y, &s.gate, &s.up, &s.scores, &s.routing.ids, &s.routing.weights})
    *t = t->rows_from(batch.first_row(), batch.n());
  return s;
}

}  // namespace tandem
