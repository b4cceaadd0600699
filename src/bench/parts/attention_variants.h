// Five ways to compute one token's multi-head latent attention, projections included. They differ
// in what is cached and when matrices are multiplied; the names are those of madsys' DeepSeek-V2
// profile.
//   CD        keys and values of every head are cached
//   CC        latents are cached; keys and values of all tokens are restored in every step
//   A_CC      latents are cached; queries are projected to latent space; queries and keys are
//             copied together
//   A_CC_ME   like A_CC without the copies: the engine's form
//   AM_CC_ME  the matrices on both sides of the latents are multiplied in advance
#pragma once
#include "bench/benchmark.h"
#include "core/team.h"
#include "model/batch.h"
#include "model/rope.h"
#include "model/weight_format.h"
#include "model/weights.h"
#include "ops/cpu_ops.h"
#include "ops/device.h"
#include "scheduling/kv_cache.h"

namespace tandem {

enum class AttentionVariant { kCD, kCC, kACC, kACCME, kAMCCME };
constexpr int kNumAttentionVariants = 5;
const char* name_of(AttentionVariant variant);

// The matrices that AM_CC_ME multiplies in advance.
struct Materialized {
  QuantView q_latent;  // [heads * kv_rank, q_rank]
  QuantView q_rope;    // [heads * rope_dim, q_rank]: the rope rows of q_b
  QuantView o;         // [dim, heads * kv_rank]
};

// The configuration of CD's cache: every head is a sequence with consecutive pages, and its
// "latent" is [nope_dim key | v_dim value].
ModelConfig config_of_heads(const ModelConfig& config);
// CD's cache of a context, restored by kv_b from the latents. Both are in host memory, in one type.
KvCache cache_of_heads(const cpu::KernelTable& kernels, const ModelConfig& config,
                       const QuantView& kv_b, TensorView latents, std::span<const int32_t> pages,
                       int context, Team& team);
int64_t bytes_of_cache_of_heads(const ModelConfig& config, int context, DType type);

// One layer and one sequence whose last token is computed, on any device. Models must have a
// q_lora_rank, and heads that are no wider than the latents.
class AttentionVariants {
 public:
  // Begins a step of `ops`, which must support steps of max_tokens(). Weights and caches are on
  // `device`, which `ops` belong to. All references must outlive the object.
  AttentionVariants(const ModelConfig& config, const AttentionWeights& weights,
                    const Materialized& materialized, TensorView latents,
                    std::span<const int32_t> pages, TensorView heads, int context, Ops& ops,
                    Device& device);
  static int max_tokens(const MlaConfig& mla) { return 1 + mla.n_heads; }

  // y = attention of h by the variant, both [1, dim].
  void run(AttentionVariant variant, TensorView h, TensorView y);

 private:
  void project_query(bool materialized);
  void append_latent(TensorView h);
  void append_to_heads();
  void attend_heads();
  void attend_absorbed(bool copies, bool materialized);
  void copy_latents();
  void copy(TensorView from, TensorView to);
  MlaArgs args(TensorView latents) const;
  RopeTable rope() const { return {frequencies_, rope_amplitude(c_.rope)}; }

  const ModelConfig& c_;
  const MlaConfig head_;  // of the per-head caches
  const AttentionWeights& w_;
  const Materialized& m_;
  Ops& ops_;
  Device& device_;
  const TensorView latents_, heads_;
  const std::vector<int32_t> pages_, pages_of_heads_;
  const std::vector<int32_t> tokens_, positions_;
  const std::vector<Sequence> sequences_;  // the sequence of latents, then those of the heads
  const Batch token_, token_of_heads_;     // parts of the step
  const std::vector<float> frequencies_;
  Arena arena_;
  TensorView q_a_, q_, q_latent_, q_rope_, q_together_, kv_, restored_, o_latent_, o_;
  TensorView q_of_heads_, kv_of_heads_, o_of_heads_;
  TensorView copy_;  // of latents_
};

// Bytes of weights and caches that a step reads and writes, and all its operations.
Cost cost_of_variant(AttentionVariant variant, const ModelConfig& config, WeightFormat format,
                     int64_t context, int64_t cache_element_bytes);

// For `tandem bench attention --variants`. Throws Error for a model whose attention has no
// variants.
void check_variants_input(const BenchInput& bench);
// A row per variant.
void bench_attention_variants(const BenchInput& bench, const cpu::KernelTable& kernels,
                              MachineSpeed& speed, const OnRow& on_row);

}  // namespace tandem
