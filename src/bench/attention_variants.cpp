#include "bench/attention_variants.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "bench/attention_bench.h"
#include "offload/plan/cost.h"
#include "ops/cpu_weights.h"

namespace tandem {

const char* name_of(AttentionVariant variant) {
  constexpr const char* kNames[kNumAttentionVariants] = {"CD", "CC", "A_CC", "A_CC_ME", "AM_CC_ME"};
  return kNames[static_cast<int>(variant)];
}

AttentionVariants::AttentionVariants(const cpu::KernelTable& kernels, const ModelConfig& config,
                                     const AttentionWeights& weights,
                                     const Materialized& materialized, const KvCache& cache,
                                     std::span<const int32_t> pages, int context, Team& team)
    : kernels_(kernels),
      c_(config),
      w_(weights),
      m_(materialized),
      team_(team),
      ops_(kernels, config, kPageSize, team),
      context_(context),
      cache_(cache.layer(0)),
      pages_(pages.begin(), pages.end()),
      sequence_{0, 1, context, pages_},
      token_{0},
      positions_{context - 1},
      batch_{token_, positions_, {&sequence_, 1}, {}},
      frequencies_(rope_frequencies(config.rope, config.mla.rope_dim)) {
  const MlaConfig& m = c_.mla;
  const int64_t heads = m.n_heads;
  arena_ = Arena::holding([&](auto visit) {
    visit(q_a_, 1, m.q_rank, DType::kF32);
    visit(q_, 1, heads * m.qk_dim(), DType::kF32);
    visit(q_latent_, heads, m.kv_rank, DType::kF32);
    visit(q_rope_, heads, m.rope_dim, DType::kF32);
    visit(q_together_, heads, m.cache_dim(), DType::kF32);
    visit(kv_, kPageSize, m.cache_dim(), DType::kF32);
    visit(restored_, kPageSize, heads * (m.nope_dim + m.v_dim), DType::kF32);
    visit(o_latent_, heads, m.kv_rank, DType::kF32);
    visit(o_, 1, heads * m.v_dim, DType::kF32);
    visit(decompressed_, heads * context, m.qk_dim() + m.v_dim, cache_.dtype);
    visit(copy_, cache_.rows, cache_.cols, cache_.dtype);
  });
  for (int first = 0; first < context; first += kPageSize) {
    const int64_t n = std::min(kPageSize, context - first);
    const TensorView rows = cache_.rows_from(int64_t{pages_[first / kPageSize]} * kPageSize, n);
    for (int64_t r = 0; r < n; ++r)
      kernels_.decode({rows.row_data(r), kernel_type(rows.dtype), kv_.row<float>(r), rows.cols});
    ops_.linear(kv_.rows_from(0, n).cols_from(0, m.kv_rank), w_.kv_b, restored_.rows_from(0, n));
    store_decompressed(restored_.rows_from(0, n), first);
  }
}

void AttentionVariants::run(AttentionVariant variant, TensorView h, TensorView y) {
  const bool materialized = variant == AttentionVariant::kAMCCME;
  ops_.linear(h, w_.q_a, q_a_);
  ops_.rms_norm(q_a_, w_.q_a_norm, c_.latent_norm_eps, q_a_);
  project_query(materialized);
  append_latent(h);
  switch (variant) {
    case AttentionVariant::kCD:
      append_decompressed();
      attend_decompressed();
      break;
    case AttentionVariant::kCC:
      ops_.mla_naive(args(cache_), w_.kv_b);
      break;
    case AttentionVariant::kACC:
    case AttentionVariant::kACCME:
    case AttentionVariant::kAMCCME:
      attend_absorbed(variant == AttentionVariant::kACC, materialized);
      break;
  }
  if (materialized)
    ops_.linear(o_latent_.reshape(1, o_latent_.rows * o_latent_.cols), m_.o, y);
  else
    ops_.linear(o_, w_.o, y);
}

void AttentionVariants::project_query(bool materialized) {
  const MlaConfig& m = c_.mla;
  const RopeTable rope{frequencies_, rope_amplitude(c_.rope)};
  if (materialized) {
    ops_.linear(q_a_, m_.q_latent, q_latent_.reshape(1, q_latent_.rows * q_latent_.cols));
    ops_.linear(q_a_, m_.q_rope, q_rope_.reshape(1, q_rope_.rows * q_rope_.cols));
    ops_.rope(q_rope_, positions_, rope);
    return;
  }
  ops_.linear(q_a_, w_.q_b, q_);
  ops_.rope(q_.reshape(m.n_heads, m.qk_dim()).cols_from(m.nope_dim, m.rope_dim), positions_, rope);
}

void AttentionVariants::append_latent(TensorView h) {
  const MlaConfig& m = c_.mla;
  const TensorView kv = kv_.rows_from(0, 1), latent = kv.cols_from(0, m.kv_rank);
  ops_.linear(h, w_.kv_a, kv);
  ops_.rms_norm(latent, w_.kv_a_norm, c_.latent_norm_eps, latent);
  ops_.rope(kv.cols_from(m.kv_rank, m.rope_dim), positions_,
            {frequencies_, rope_amplitude(c_.rope)});
  ops_.append_kv(batch_, kv, cache_);
}

void AttentionVariants::append_decompressed() {
  const TensorView restored = restored_.rows_from(0, 1);
  ops_.linear(kv_.rows_from(0, 1).cols_from(0, c_.mla.kv_rank), w_.kv_b, restored);
  store_decompressed(restored, context_ - 1);
}

// Of the latents in kv_ and what they were restored to, both of the tokens from `first` on.
void AttentionVariants::store_decompressed(TensorView restored, int first) {
  const MlaConfig& m = c_.mla;
  const auto store = [&](const float* from, const TensorView& to, int64_t row) {
    if (to.dtype == DType::kF32)
      std::copy_n(from, to.cols, to.row<float>(row));
    else
      kernels_.encode_bf16({from, to.row<cpu::bf16>(row), to.cols});
  };
  const TensorView k = decompressed_.cols_from(0, m.nope_dim),
                   k_rope = decompressed_.cols_from(m.nope_dim, m.rope_dim),
                   v = decompressed_.cols_from(m.qk_dim(), m.v_dim);
  team_.run(m.n_heads, [&](int64_t head, int) {
    for (int64_t r = 0; r < restored.rows; ++r) {
      const float* const from = restored.row<float>(r) + head * (m.nope_dim + m.v_dim);
      const int64_t row = head * context_ + first + r;
      store(from, k, row);
      store(kv_.row<float>(r) + m.kv_rank, k_rope, row);
      store(from + m.nope_dim, v, row);
    }
  });
}

void AttentionVariants::attend_decompressed() {
  const MlaConfig& m = c_.mla;
  const TensorView q = q_.reshape(m.n_heads, m.qk_dim());
  const bool bf16 = decompressed_.dtype == DType::kBF16;
  team_.run(m.n_heads, [&](int64_t head, int) {
    std::vector<cpu::KeyBlock> blocks;
    for (int first = 0; first < context_; first += cpu::kMaxKeys) {
      const int n = std::min(cpu::kMaxKeys, context_ - first);
      const TensorView rows = decompressed_.rows_from(head * context_ + first, n);
      blocks.push_back({rows.data, rows.cols_from(m.nope_dim, m.rope_dim).data,
                        rows.cols_from(m.qk_dim(), m.v_dim).data, n, n});
    }
    float* const out = o_.row<float>(0) + head * m.v_dim;
    std::fill_n(out, m.v_dim, 0.f);
    float max = -std::numeric_limits<float>::infinity(), sum = 0;
    const int64_t stride = decompressed_.row_bytes();
    kernels_.attend({.type = bf16 ? cpu::ActivationType::kBF16 : cpu::ActivationType::kF32,
                     .q = q.row<float>(head),
                     .q_rope = q.row<float>(head) + m.nope_dim,
                     .q_stride = q.stride,
                     .q_rope_stride = q.stride,
                     .blocks = blocks.data(),
                     .n_blocks = static_cast<int>(blocks.size()),
                     .k_stride = stride,
                     .k_rope_stride = stride,
                     .v_stride = stride,
                     .n_queries = 1,
                     .dim = m.nope_dim,
                     .rope_dim = m.rope_dim,
                     .v_dim = m.v_dim,
                     .first_query = 0,
                     .queries_per_token = 1,
                     .scale = softmax_scale(c_),
                     .out = out,
                     .out_stride = m.v_dim,
                     .max = &max,
                     .sum = &sum});
    for (int i = 0; i < m.v_dim; ++i) out[i] /= sum;
  });
}

void AttentionVariants::attend_absorbed(bool copies, bool materialized) {
  const MlaConfig& m = c_.mla;
  const TensorView q = q_.reshape(m.n_heads, m.qk_dim());
  const LinearPerHead through_kv_b{.x = q.cols_from(0, m.nope_dim),
                                   .w = w_.kv_b,
                                   .n_heads = m.n_heads,
                                   .first_row = 0,
                                   .rows_per_head = m.nope_dim + m.v_dim,
                                   .transposed = true,
                                   .out = q_latent_};
  MlaArgs a = args(cache_);
  a.q = q_latent_;
  a.out = o_latent_;
  if (materialized) {
    a.q_rope = q_rope_;
  } else {
    ops_.linear_per_head(through_kv_b);
  }
  if (copies) {
    for (int head = 0; head < m.n_heads; ++head) {
      float* const to = q_together_.row<float>(head);
      std::copy_n(q_latent_.row<float>(head), m.kv_rank, to);
      std::copy_n(q.row<float>(head) + m.nope_dim, m.rope_dim, to + m.kv_rank);
    }
    team_.run(std::ssize(pages_), [&](int64_t page, int) {
      const TensorView from = cache_.rows_from(int64_t{pages_[page]} * kPageSize, kPageSize);
      std::memcpy(copy_.row_data(int64_t{pages_[page]} * kPageSize), from.data,
                  kPageSize * from.row_bytes());
    });
    a.q = q_together_.cols_from(0, m.kv_rank);
    a.q_rope = q_together_.cols_from(m.kv_rank, m.rope_dim);
    a.cache = copy_;
  }
  ops_.mla_absorbed(a);
  if (materialized) return;
  LinearPerHead back = through_kv_b;
  back.x = o_latent_;
  back.first_row = m.nope_dim;
  back.transposed = false;
  back.out = o_.reshape(m.n_heads, m.v_dim);
  ops_.linear_per_head(back);
}

MlaArgs AttentionVariants::args(TensorView cache) const {
  const MlaConfig& m = c_.mla;
  const TensorView q = q_.reshape(m.n_heads, m.qk_dim());
  return {batch_.sequences,
          q.cols_from(0, m.nope_dim),
          q.cols_from(m.nope_dim, m.rope_dim),
          cache,
          m,
          softmax_scale(c_),
          o_.reshape(m.n_heads, m.v_dim)};
}

Cost cost_of_variant(AttentionVariant variant, const ModelConfig& config, WeightFormat format,
                     int64_t context, int64_t element_bytes) {
  const MlaConfig& m = config.mla;
  const int64_t heads = m.n_heads, kv_b_rows = heads * (m.nope_dim + m.v_dim);
  Cost cost;
  const auto matrix = [&](int64_t rows, int64_t cols, WeightFormat f) {
    cost.bytes += matrix_bytes(config, rows, cols, f);
    cost.ops += 2 * rows * cols;
  };
  matrix(m.q_rank, config.dim, format);
  matrix(m.cache_dim(), config.dim, format);
  if (variant == AttentionVariant::kAMCCME) {
    matrix(heads * m.cache_dim(), m.q_rank, {DType::kBF16});
    matrix(config.dim, heads * m.kv_rank, {DType::kBF16});
  } else {
    matrix(heads * m.qk_dim(), m.q_rank, format);
    matrix(config.dim, heads * m.v_dim, format);
    matrix(kv_b_rows, m.kv_rank, format);  // once, whether for one token or in two halves
  }
  const AttentionCost absorbed = cost_of_absorbed(m, context, element_bytes);
  const int64_t decompressed = context * heads * (m.qk_dim() + m.v_dim);
  switch (variant) {
    case AttentionVariant::kCD:
      cost.bytes += decompressed * element_bytes;
      cost.ops += 2 * decompressed;
      break;
    case AttentionVariant::kCC:
      cost.bytes += absorbed.bytes;
      cost.ops += 2 * decompressed + 2 * (context - 1) * kv_b_rows * m.kv_rank;
      break;
    case AttentionVariant::kACC:
      cost.bytes += 3 * absorbed.bytes;  // read, written and read again
      cost.ops += absorbed.ops;
      break;
    case AttentionVariant::kACCME:
    case AttentionVariant::kAMCCME:
      cost.bytes += absorbed.bytes;
      cost.ops += absorbed.ops;
      break;
  }
  return cost;
}

}  // namespace tandem
