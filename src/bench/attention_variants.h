// Five ways to compute one token's multi-head latent attention, projections included (the names are
// those of madsys' DeepSeek-V2 profile): what is cached, and which matrices are multiplied when.
//   CD        keys and values of every head are cached
//   CC        latents are cached; keys and values of all tokens are restored in every step
//   A_CC      latents are cached; queries go into their space; queries and keys are copied together
//   A_CC_ME   the same without the copies: what the engine does
//   AM_CC_ME  the matrices on both sides of the latents multiplied beforehand
#pragma once
#include "bench/experts_bench.h"
#include "bench/roofline.h"
#include "engine/kv_cache.h"
#include "model/rope.h"
#include "ops/cpu_ops.h"

namespace tandem {

enum class AttentionVariant { kCD, kCC, kACC, kACCME, kAMCCME };
constexpr int kNumAttentionVariants = 5;
const char* name_of(AttentionVariant variant);

// The products that AM_CC_ME makes beforehand.
struct Materialized {
  QuantView q_latent;  // [heads * kv_rank, q_rank]
  QuantView q_rope;    // [heads * rope_dim, q_rank]: the rope rows of q_b
  QuantView o;         // [dim, heads * kv_rank]
};

// One layer and one sequence whose last token is computed. Models with q_lora_rank only.
class AttentionVariants {
 public:
  // Fills the cache of CD from that of the latents. All references outlive the object.
  AttentionVariants(const cpu::KernelTable& kernels, const ModelConfig& config,
                    const AttentionWeights& weights, const Materialized& materialized,
                    const KvCache& cache, std::span<const int32_t> pages, int context, Team& team);

  // y = attention of h, both [1, dim], as the variant does it.
  void run(AttentionVariant variant, TensorView h, TensorView y);

 private:
  void project_query(bool materialized);
  void append_latent(TensorView h);
  void append_decompressed();
  void attend_decompressed();
  void attend_absorbed(bool copies, bool materialized);
  void store_decompressed(TensorView restored, int first);
  MlaArgs args(TensorView cache) const;

  const cpu::KernelTable& kernels_;
  const ModelConfig& c_;
  const AttentionWeights& w_;
  const Materialized& m_;
  Team& team_;
  CpuOps ops_;
  const int context_;
  const TensorView cache_;
  const std::vector<int32_t> pages_;
  const Sequence sequence_;
  const std::vector<int32_t> token_, positions_;
  const Batch batch_;
  const std::vector<float> frequencies_;
  Arena arena_;
  TensorView q_a_, q_, q_latent_, q_rope_, q_together_, kv_, restored_, o_latent_, o_;
  TensorView decompressed_;  // [heads * context, nope + rope + v]
  TensorView copy_;          // of the cache
};

// Beside the weights, what a step reads and writes of caches, and all its operations.
Cost cost_of_variant(AttentionVariant variant, const ModelConfig& config, WeightFormat format,
                     int64_t context, int64_t cache_element_bytes);

}  // namespace tandem
