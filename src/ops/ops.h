// The verbs of a DeepSeek backbone. They hide the hardware: the forward pass in engine/ is written
// once against them. Activations are matrices of the device's own working type (float on a CPU); no
// verb allocates.
#pragma once
#include <cstdint>
#include <functional>
#include <span>

#include "core/memory.h"
#include "core/tensor.h"
#include "model/batch.h"
#include "model/config.h"

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

constexpr int kPageSize = 64;  // tokens in a page of the cache

// What else the verbs of a step depend on: whose memory they work on, and in which parts.
struct StepForm {
  const void *activations, *cache;
  int n_in_first_part;
  // clang 14 compares with a zero of its own.
  auto operator<=>(const StepForm&) const = default;  // NOLINT(modernize-use-nullptr)
};

// How the token of a row of logits is drawn; engine/sampler.h says what each number means.
struct Draw {
  int32_t row;
  float temperature, top_p, min_p;
  int32_t top_k;
  double uniform;  // in [0, 1)
};

class Ops {
 public:
  virtual ~Ops() = default;

  // Memory of the device for the matrices of the verbs, before the first step. Throws Error when
  // too little is left.
  virtual Buffer allocate(int64_t bytes) = 0;
  // Precedes the other verbs of a step. The spans that they are given are those of `batch`, or
  // parts of them.
  virtual void begin(const Batch& batch) = 0;
  // Has verbs() call the verbs of a step in which every sequence has one token and none wants the
  // naive form. They depend on the form and the numbers of tokens and logit rows alone, so a device
  // may record them once and repeat them without asking again. True: it repeats them now
  // (RoutedExperts::follow).
  virtual bool run_decode(const StepForm&, const std::function<void()>& verbs) {
    verbs();
    return false;
  }
  // Memory of the host for copy(), before the first step; empty where the device works in the
  // host's memory anyway. Throws Error when too little is left.
  virtual Buffer allocate_on_host(int64_t /*bytes*/) { return {}; }
  // Enqueues a copy within memory of allocate(), or between it and that of allocate_on_host(), in
  // the order of the verbs.
  virtual void copy(const void* from, int64_t bytes, void* to) = 0;
  // Until all that was enqueued is done.
  virtual void wait() {}
  // Brings a matrix to the host, and waits for it.
  virtual void to_host(TensorView x, TensorView out) = 0;
  // Prepares draw() for up to max_rows rows of logits of n_tokens tokens; those may be drawn whose
  // bit in `allowed` is set. The last call counts. False: this device does not draw.
  virtual bool prepare_draws(std::span<const uint32_t>, int /*n_tokens*/, int /*max_rows*/) {
    return false;
  }
  // Draws a token for each, -1 where a logit of the row is not finite, and waits for them. Consumes
  // the rows.
  virtual void draw(TensorView /*logits*/, std::span<const Draw>, std::span<int32_t> /*tokens*/) {}

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
