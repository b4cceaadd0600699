// The operations of a DeepSeek backbone. They hide the hardware: the forward pass in engine/ is
// written once against them. Activations are float matrices in the memory of the Device; no
// operation allocates or waits.
#pragma once
#include <cstdint>
#include <span>

#include "core/tensor.h"
#include "core/topology.h"
#include "model/batch.h"
#include "model/kv_layout.h"

namespace tandem {

// out[t, h] = x[t, h] w_h^T, or out[t, h] = x[t, h] w_h if transposed. w_h are the rows of w from
// first_row + h * rows_per_head on: out.cols of them, or x.cols if transposed.
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

// What a layer's attention does before it attends: rotates the queries, normalises the latents and
// rotates the keys of kv, and writes both to the cache. Overwrites kv.
struct AppendArgs {
  const Batch& batch;
  TensorView q_rope;             // [tokens * heads, rope_dim], rotated in place
  TensorView kv;                 // [tokens, kv_rank + rope_dim]
  const QuantView& latent_gain;  // [1, kv_rank]
  float eps;
  const RopeTable& rope;
  TensorView cache;
};

// Causal attention of some sequences of a step over the paged cache, whose rows are [kv_rank latent
// | rope_dim key] of a token. Output rows of other sequences are not written; the matrices start
// with the first row of the step.
struct MlaArgs {
  std::span<const Sequence> sequences;
  TensorView q;       // [tokens * heads, kv_rank] absorbed, [tokens * heads, nope_dim] naive
  TensorView q_rope;  // [tokens * heads, rope_dim]
  TensorView cache;   // [pages * page_size, kv_rank + rope_dim]
  const MlaConfig& mla;
  float softmax_scale;
  TensorView out;  // [tokens * heads, kv_rank] absorbed, [tokens * heads, v_dim] naive
};

// Replaces the experts that a router chooses: token i takes a row of `ids` (simulated_row()).
struct SimulatedRows {
  TensorView ids = {};  // kI32 [rows, n_active] in the device's memory; no rows: the router chooses
  bool varies = false;
  std::span<const int32_t> positions = {};    // [tokens]
  int64_t first_token = 0, token_stride = 1;  // token i is number first_token + i * token_stride
};

// Chooses experts by the products of x with the rows of w. x is not rounded as in other products,
// because near ties decide which experts run.
struct RouteArgs {
  TensorView x;           // [tokens, dim]
  const QuantView& w;     // [n_experts, dim]
  const QuantView& bias;  // [1, n_experts], empty if the router has none
  const RouterConfig& router;
  TensorView logits;  // [tokens, n_experts], scratch
  Routing out;
  // [n_experts] in the device's memory: how often each expert was chosen, modulo 2^32, to which
  // these choices are added; null: they are not counted.
  uint32_t* uses = nullptr;
  SimulatedRows simulated = {};
};

class Ops {
 public:
  virtual ~Ops() = default;

  // Called before the other operations of a step. Their spans must be spans of `batch` or parts of
  // them.
  virtual void begin(const Batch& batch) = 0;

  virtual void embed(std::span<const int32_t> tokens, const QuantView& table, TensorView out) = 0;
  virtual void rms_norm(TensorView x, const QuantView& gain, float eps, TensorView out) = 0;
  virtual void add(TensorView x, TensorView delta) = 0;                       // x += delta
  virtual void clear(TensorView x) = 0;                                       // x = 0
  virtual void linear(TensorView x, const QuantView& w, TensorView out) = 0;  // out = x w^T
  virtual void linear_per_head(const LinearPerHead& args) = 0;
  // Rotates the adjacent pairs (2i, 2i + 1) of each row, in place. One token may have several rows.
  virtual void rope(TensorView x, std::span<const int32_t> positions, const RopeTable& table) = 0;
  // Writes the rows of kv [batch.n(), kv_rank + rope_dim] to the cache.
  virtual void append_kv(const Batch& batch, TensorView kv, TensorView cache) = 0;
  // Attention in the latent space: scores are q.c + q_rope.k_rope, the output is the weighted sum
  // of latents c.
  virtual void mla_absorbed(const MlaArgs& args) = 0;
  // The same with keys and values of every head restored from the latents by kv_b, a block of
  // tokens at a time.
  virtual void mla_naive(const MlaArgs& args, const QuantView& kv_b) = 0;
  virtual void silu_mul(TensorView gate, TensorView up) = 0;  // gate = silu(gate) * up
  virtual void route(const RouteArgs& args) = 0;
  virtual void gather_rows(TensorView x, std::span<const int32_t> rows, TensorView out) = 0;

  // What ranks that divide a backbone do together, waiting for each other; nothing on one rank.
  // Throws GroupError when a rank is lost.
  virtual void all_reduce(TensorView /*x*/) {}  // x = sum of x of all ranks, with the same bits
  // Columns slices[r] of x come from rank r. The slices cover the columns in order.
  virtual void all_gather_cols(TensorView /*x*/, std::span<const Slice> /*slices*/) {}

  // What the like ranks of all replicas of a backbone do together, which divide dense layers and
  // the head. n_rows: [replicas] that each has; the rows of all are one replica's after another's.
  // all = the rows of all replicas, of which `mine` are this one's.
  virtual void gather_replicas(TensorView /*mine*/, std::span<const int64_t> /*n_rows*/,
                               TensorView /*all*/) {}
  // mine = the sum of this replica's rows of `all` of all ranks. Overwrites `all`.
  virtual void scatter_replicas(TensorView /*all*/, std::span<const int64_t> /*n_rows*/,
                                TensorView /*mine*/) {}
  // Columns slices[r] of `mine` come from rank r, which has them of all replicas' rows: `all` has
  // those of this rank. Overwrites `scratch`, of as many numbers as this replica's rows of all
  // slices have.
  virtual void exchange_replicas(TensorView /*all*/, std::span<const int64_t> /*n_rows*/,
                                 TensorView /*mine*/, std::span<const Slice> /*slices*/,
                                 TensorView /*scratch*/) {}

  // Moves the rows of a step from a pipeline stage to the next one, which receives them in the same
  // order.
  virtual void send(TensorView /*x*/) {}
  virtual void receive(TensorView /*x*/) {}

  // Compositions of the above, which a device may compute with fewer kernels.
  // x += delta, then out = rms_norm(x).
  virtual void add_rms_norm(TensorView x, TensorView delta, const QuantView& gain, float eps,
                            TensorView out) {
    add(x, delta);
    rms_norm(x, gain, eps, out);
  }
  // out = rms_norm(x) w^T. Overwrites x.
  virtual void norm_linear(TensorView x, const QuantView& gain, float eps, const QuantView& w,
                           TensorView out) {
    rms_norm(x, gain, eps, x);
    linear(x, w, out);
  }
  // Two products of one x.
  virtual void linear_pair(TensorView x, const QuantView& w_0, TensorView out_0,
                           const QuantView& w_1, TensorView out_1) {
    linear(x, w_0, out_0);
    linear(x, w_1, out_1);
  }
  // out = silu(x gate^T) * (x up^T). Overwrites `scratch`, of the shape of out.
  virtual void gated_linear(TensorView x, const QuantView& gate, const QuantView& up,
                            TensorView out, TensorView scratch) {
    linear(x, gate, out);
    linear(x, up, scratch);
    silu_mul(out, scratch);
  }
  // mla_absorbed(), whose output `restore` multiplies. Overwrites both outputs.
  virtual void attend_and_restore(const MlaArgs& attend, const LinearPerHead& restore) {
    mla_absorbed(attend);
    linear_per_head(restore);
  }
  virtual void rotate_and_append(const AppendArgs& a) {
    const TensorView latent = a.kv.cols_from(0, a.kv.cols - a.q_rope.cols);
    rope(a.q_rope, a.batch.positions, a.rope);
    rms_norm(latent, a.latent_gain, a.eps, latent);
    rope(a.kv.cols_from(latent.cols, a.q_rope.cols), a.batch.positions, a.rope);
    append_kv(a.batch, a.kv, a.cache);
  }
};

}  // namespace tandem
