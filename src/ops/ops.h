// The verbs of a DeepSeek backbone. They hide the hardware: the forward pass in engine/ is written
// once against them. Activations are float matrices in the memory of the verbs' Device; no verb
// allocates or waits.
#pragma once
#include <cstdint>
#include <span>

#include "core/tensor.h"
#include "model/batch.h"
#include "model/kv_layout.h"

namespace tandem {

// Head h of every token is multiplied by its own rows of w, which begin at first_row + h *
// rows_per_head: out[t, h] = x[t, h] w_h^T with out.cols rows of w a head, or, transposed, out[t,
// h] = x[t, h] w_h with x.cols rows.
struct LinearPerHead {
  TensorView x;  // [tokens * heads, in]
  QuantView w;
  int n_heads;
  int64_t first_row, rows_per_head;
  bool transposed;
  TensorView out;  // [tokens * heads, out]
};

struct RopeTable {
  std::span<const float> frequencies;  // [rope_dim / 2]
  float amplitude;
};

// Causal attention of some sequences of a step over the paged cache, which holds [kv_rank latent |
// rope_dim key] a token. Rows of sequences that are not named are left alone; the matrices
// begin with the step's first.
struct MlaArgs {
  std::span<const Sequence> sequences;
  TensorView q;       // [tokens * heads, kv_rank] absorbed, [tokens * heads, nope_dim] naive
  TensorView q_rope;  // [tokens * heads, rope_dim]
  TensorView cache;   // [pages * page_size, kv_rank + rope_dim]
  const MlaConfig& mla;
  float softmax_scale;
  TensorView out;  // [tokens * heads, kv_rank] absorbed, [tokens * heads, v_dim] naive
};

// Chooses experts by the products of x with the rows of w. Near ties decide which experts run, so x
// is not rounded as in other products.
struct RouteArgs {
  TensorView x;           // [tokens, dim]
  const QuantView& w;     // [n_experts, dim]
  const QuantView& bias;  // [1, n_experts], empty where the router has none
  const RouterConfig& router;
  TensorView logits;  // [tokens, n_experts], scratch
  Routing out;
};

class Ops {
 public:
  virtual ~Ops() = default;

  // Precedes the other verbs of a step. The spans that they are given are those of `batch`, or
  // parts of them.
  virtual void begin(const Batch& batch) = 0;

  virtual void embed(std::span<const int32_t> tokens, const QuantView& table, TensorView out) = 0;
  virtual void rms_norm(TensorView x, const QuantView& gain, float eps, TensorView out) = 0;
  virtual void add(TensorView x, TensorView delta) = 0;                       // x += delta
  virtual void clear(TensorView x) = 0;                                       // x = 0
  virtual void linear(TensorView x, const QuantView& w, TensorView out) = 0;  // out = x w^T
  virtual void linear_per_head(const LinearPerHead& args) = 0;
  // Rotates the adjacent pairs (2i, 2i + 1) of each row, in place. Several rows may belong to one
  // token.
  virtual void rope(TensorView x, std::span<const int32_t> positions, const RopeTable& table) = 0;
  // kv: [batch.n(), kv_rank + rope_dim]
  virtual void append_kv(const Batch& batch, TensorView kv, TensorView cache) = 0;
  // Attention in the space of the latents: scores are q.c + q_rope.k_rope, the output is the sum of
  // latents c.
  virtual void mla_absorbed(const MlaArgs& args) = 0;
  // The same with keys and values of every head restored from the latents by kv_b, a block of
  // tokens at a time.
  virtual void mla_naive(const MlaArgs& args, const QuantView& kv_b) = 0;
  virtual void silu_mul(TensorView gate, TensorView up) = 0;  // gate = silu(gate) * up
  virtual void route(const RouteArgs& args) = 0;
  virtual void gather_rows(TensorView x, std::span<const int32_t> rows, TensorView out) = 0;
};

}  // namespace tandem
