#include "bench/parts/attention_variants.h"

#include <algorithm>

#include "bench/random_inputs.h"
#include "model/cost.h"
#include "ops/cpu_weights.h"

namespace tandem {
namespace {

int64_t tokens_of_heads(const MlaConfig& m, int context) {
  return int64_t{m.n_heads} * pages_for(context) * kPageSize;
}

std::vector<Sequence> sequences_of(std::span<const int32_t> pages,
                                   std::span<const int32_t> pages_of_heads, int n_heads,
                                   int context) {
  std::vector<Sequence> sequences = {{0, 1, context, pages}};
  for (int head = 0; head < n_heads; ++head)
    sequences.push_back(
        {1 + head, 1, context, pages_of_heads.subspan(head * pages.size(), pages.size())});
  return sequences;
}

}  // namespace

const char* name_of(AttentionVariant variant) {
  constexpr const char* kNames[kNumAttentionVariants] = {"CD", "CC", "A_CC", "A_CC_ME", "AM_CC_ME"};
  return kNames[static_cast<int>(variant)];
}

ModelConfig config_of_heads(const ModelConfig& config) {
  ModelConfig c = config;
  c.n_layers = 1;
  c.mla.n_heads = 1;
  c.mla.kv_rank = c.mla.nope_dim + c.mla.v_dim;
  return c;
}

int64_t bytes_of_cache_of_heads(const ModelConfig& c, int context, DType type) {
  return KvCache::bytes_for(config_of_heads(c), tokens_of_heads(c.mla, context), type);
}

KvCache cache_of_heads(const cpu::KernelTable& kernels, const ModelConfig& config,
                       const QuantView& kv_b, TensorView latents, std::span<const int32_t> pages,
                       int context, Team& team) {
  const MlaConfig& m = config.mla;
  const int64_t tokens_of_head = std::ssize(pages) * kPageSize, cols = m.nope_dim + m.v_dim;
  CpuOps ops(kernels, config, kPageSize, team);
  TensorView kv, restored;
  const Arena scratch = Arena::holding([&](auto visit) {
    visit(kv, kPageSize, m.cache_dim(), DType::kF32);
    visit(restored, kPageSize, m.n_heads * cols, DType::kF32);
  });
  KvCache cache(config_of_heads(config), tokens_of_heads(m, context), latents.dtype);
  const auto store = [&](const float* from, const TensorView& to, int64_t row) {
    if (to.dtype == DType::kF32)
      std::copy_n(from, to.cols, to.row<float>(row));
    else
      kernels.encode_bf16({from, to.row<cpu::bf16>(row), to.cols});
  };
  const TensorView k_and_v = cache.layer(0).cols_from(0, cols),
                   k_rope = cache.layer(0).cols_from(cols, m.rope_dim);
  for (int first = 0; first < context; first += kPageSize) {
    const int64_t n = std::min(kPageSize, context - first);
    const TensorView rows = latents.rows_from(int64_t{pages[first / kPageSize]} * kPageSize, n);
    for (int64_t r = 0; r < n; ++r)
      kernels.decode({rows.row_data(r), kernel_type(rows.dtype), kv.row<float>(r), rows.cols});
    ops.linear(kv.rows_from(0, n).cols_from(0, m.kv_rank), kv_b, restored.rows_from(0, n));
    team.run(m.n_heads, [&](int64_t head, int) {
      for (int64_t r = 0; r < n; ++r) {
        const int64_t row = head * tokens_of_head + first + r;
        store(restored.row<float>(r) + head * cols, k_and_v, row);
        store(kv.row<float>(r) + m.kv_rank, k_rope, row);
      }
    });
  }
  return cache;
}

AttentionVariants::AttentionVariants(const ModelConfig& config, const AttentionWeights& weights,
                                     const Materialized& materialized, TensorView latents,
                                     std::span<const int32_t> pages, TensorView heads, int context,
                                     Ops& ops, Device& device)
    : c_(config),
      head_(config_of_heads(config).mla),
      w_(weights),
      m_(materialized),
      ops_(ops),
      device_(device),
      latents_(latents),
      heads_(heads),
      pages_(pages.begin(), pages.end()),
      pages_of_heads_(first_pages(config.mla.n_heads * static_cast<int>(pages.size()))),
      tokens_(max_tokens(config.mla), 0),
      positions_(max_tokens(config.mla), context - 1),
      sequences_(sequences_of(pages_, pages_of_heads_, config.mla.n_heads, context)),
      token_{std::span(tokens_).first(1),
             std::span(positions_).first(1),
             std::span(sequences_).first(1),
             {}},
      token_of_heads_{std::span(tokens_).subspan(1),
                      std::span(positions_).subspan(1),
                      std::span(sequences_).subspan(1),
                      {}},
      frequencies_(rope_frequencies(config.rope, config.mla.rope_dim)) {
  const MlaConfig& m = c_.mla;
  check(head_.kv_rank <= m.kv_rank, "scratch of attention is as wide as the latents");
  const int64_t n = m.n_heads;
  arena_ = Arena::holding(
      [&](auto visit) {
        visit(q_a_, 1, m.q_rank, DType::kF32);
        visit(q_, 1, n * m.qk_dim(), DType::kF32);
        visit(q_latent_, n, m.kv_rank, DType::kF32);
        visit(q_rope_, n, m.rope_dim, DType::kF32);
        visit(q_together_, n, m.cache_dim(), DType::kF32);
        visit(kv_, 1, m.cache_dim(), DType::kF32);
        visit(restored_, 1, n * head_.kv_rank, DType::kF32);
        visit(o_latent_, n, m.kv_rank, DType::kF32);
        visit(o_, 1, n * m.v_dim, DType::kF32);
        // Row 0 belongs to the sequence of latents and is unused.
        visit(q_of_heads_, 1 + n, head_.cache_dim(), DType::kF32);
        visit(kv_of_heads_, n, head_.cache_dim(), DType::kF32);
        visit(o_of_heads_, 1 + n, head_.kv_rank, DType::kF32);
        visit(copy_, latents.rows, latents.stride, latents.dtype);
      },
      [&](int64_t bytes) { return device.allocate(bytes); });
  copy_.cols = latents.cols;
  ops_.begin({tokens_, positions_, sequences_, {}});
}

void AttentionVariants::run(AttentionVariant variant, TensorView h, TensorView y) {
  const bool materialized = variant == AttentionVariant::kAMCCME;
  ops_.linear(h, w_.q_a, q_a_);
  ops_.rms_norm(q_a_, w_.q_a_norm, c_.latent_norm_eps, q_a_);
  project_query(materialized);
  append_latent(h);
  switch (variant) {
    case AttentionVariant::kCD:
      append_to_heads();
      attend_heads();
      break;
    case AttentionVariant::kCC:
      ops_.mla_naive(args(latents_), w_.kv_b);
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
  if (materialized) {
    ops_.linear(q_a_, m_.q_latent, q_latent_.reshape(1, q_latent_.rows * q_latent_.cols));
    ops_.linear(q_a_, m_.q_rope, q_rope_.reshape(1, q_rope_.rows * q_rope_.cols));
    ops_.rope(q_rope_, token_.positions, rope());
    return;
  }
  ops_.linear(q_a_, w_.q_b, q_);
  ops_.rope(q_.reshape(m.n_heads, m.qk_dim()).cols_from(m.nope_dim, m.rope_dim), token_.positions,
            rope());
}

void AttentionVariants::append_latent(TensorView h) {
  const MlaConfig& m = c_.mla;
  const TensorView latent = kv_.cols_from(0, m.kv_rank);
  ops_.linear(h, w_.kv_a, kv_);
  ops_.rms_norm(latent, w_.kv_a_norm, c_.latent_norm_eps, latent);
  ops_.rope(kv_.cols_from(m.kv_rank, m.rope_dim), token_.positions, rope());
  ops_.append_kv(token_, kv_, latents_);
}

void AttentionVariants::copy(TensorView from, TensorView to) {
  ops_.clear(to);
  ops_.add(to, from);
}

void AttentionVariants::append_to_heads() {
  const MlaConfig& m = c_.mla;
  const int64_t cols = head_.kv_rank;
  ops_.linear(kv_.cols_from(0, m.kv_rank), w_.kv_b, restored_);
  copy(restored_.reshape(m.n_heads, cols), kv_of_heads_.cols_from(0, cols));
  TensorView key_for_all = kv_.cols_from(m.kv_rank, m.rope_dim);
  key_for_all.rows = m.n_heads;
  key_for_all.stride = 0;
  copy(key_for_all, kv_of_heads_.cols_from(cols, m.rope_dim));
  ops_.append_kv(token_of_heads_, kv_of_heads_, heads_);
}

// In absorbed form a head's key and value are one latent: the query is 0 at the value's columns,
// and the key's part of the output is unused. This adds operations, but no bytes.
void AttentionVariants::attend_heads() {
  const MlaConfig& m = c_.mla;
  const int cols = head_.kv_rank;
  const TensorView q = q_.reshape(m.n_heads, m.qk_dim());
  const TensorView q_of_heads = q_of_heads_.rows_from(1, m.n_heads);
  ops_.clear(q_of_heads);
  ops_.add(q_of_heads.cols_from(0, m.nope_dim), q.cols_from(0, m.nope_dim));
  ops_.add(q_of_heads.cols_from(cols, m.rope_dim), q.cols_from(m.nope_dim, m.rope_dim));
  ops_.mla_absorbed({token_of_heads_.sequences, q_of_heads_.cols_from(0, cols),
                     q_of_heads_.cols_from(cols, m.rope_dim), heads_, head_, softmax_scale(c_),
                     o_of_heads_});
  copy(o_of_heads_.rows_from(1, m.n_heads).cols_from(m.nope_dim, m.v_dim),
       o_.reshape(m.n_heads, m.v_dim));
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
  MlaArgs a = args(latents_);
  a.q = q_latent_;
  a.out = o_latent_;
  if (materialized) {
    a.q_rope = q_rope_;
  } else {
    ops_.linear_per_head(through_kv_b);
  }
  if (copies) {
    a.q = q_together_.cols_from(0, m.kv_rank);
    a.q_rope = q_together_.cols_from(m.kv_rank, m.rope_dim);
    copy(q_latent_, a.q);
    copy(q.cols_from(m.nope_dim, m.rope_dim), a.q_rope);
    copy_latents();
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

// Copies runs of consecutive pages at once.
void AttentionVariants::copy_latents() {
  for (size_t i = 0, n = 0; i < pages_.size(); i += n) {
    for (n = 1; i + n < pages_.size() && pages_[i + n] == pages_[i + n - 1] + 1;) ++n;
    const int64_t row = int64_t{pages_[i]} * kPageSize,
                  n_rows = static_cast<int64_t>(n) * kPageSize;
    device_.copy(latents_.row_data(row), n_rows * latents_.row_bytes(), copy_.row_data(row));
  }
}

MlaArgs AttentionVariants::args(TensorView latents) const {
  const MlaConfig& m = c_.mla;
  const TensorView q = q_.reshape(m.n_heads, m.qk_dim());
  return {token_.sequences,
          q.cols_from(0, m.nope_dim),
          q.cols_from(m.nope_dim, m.rope_dim),
          latents,
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
    matrix(kv_b_rows, m.kv_rank, format);  // once, for one token as well as in two halves
  }
  const Cost absorbed = cost_of_absorbed(m, context, 1, element_bytes);
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
