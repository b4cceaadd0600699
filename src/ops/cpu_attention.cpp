// Multi-head latent attention on the CPU, in both forms, over pages of the latent cache.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/rounding.h"
#include "ops/cpu_ops.h"
#include "ops/cpu_weights.h"

namespace tandem {
namespace {

using cpu::ActivationType;

constexpr int kPartPages = 32;  // pages per part: 2048 tokens
constexpr float kNoMax = -std::numeric_limits<float>::infinity();

int n_pages(const Sequence& s) { return ceil_div(s.kv_length, kPageSize); }

int64_t cache_row(const Sequence& s, int position) {
  return int64_t{s.kv_pages[position / kPageSize]} * kPageSize + position % kPageSize;
}

// Number of keys from first_key on that the sequence's first token of the step attends to.
int visible(const Sequence& s, int first_key) { return s.kv_length - s.n_tokens + 1 - first_key; }

void divide(float* out, int64_t n, float sum) {
  for (int64_t i = 0; i < n; ++i) out[i] /= sum;
}

// Rows of a part: enough to make the packing of keys cheap, fewer if threads would be idle.
int rows_of_part(int64_t n_rows, int64_t n_splits, int n_threads) {
  int rows = kPartRows;
  while (rows > 16 && ceil_div(n_rows, rows) * n_splits < 4 * n_threads) rows /= 2;
  return rows;
}

ActivationType type_of(const TensorView& t) {
  return t.dtype == DType::kF32 ? ActivationType::kF32 : ActivationType::kBF16;
}

}  // namespace

// The rows of one page of the cache that hold tokens of `s`.
TensorView CpuOps::page_of(const MlaArgs& a, const Sequence& s, int page) {
  const int first = page * kPageSize;
  return a.cache.rows_from(cache_row(s, first), std::min(kPageSize, s.kv_length - first));
}

void CpuOps::append_kv(const Batch& batch, TensorView kv, TensorView cache) {
  for (const Sequence& s : batch.sequences) {
    for (int t = s.first_token; t < s.first_token + s.n_tokens; ++t) {
      const int i = t - batch.first_row();
      const int64_t row = cache_row(s, s.kv_length - s.n_tokens + t - s.first_token);
      if (cache.dtype == DType::kF32)
        std::copy_n(kv.row<float>(i), kv.cols, cache.row<float>(row));
      else
        kernels_.encode_bf16({kv.row<float>(i), cache.row<cpu::bf16>(row), kv.cols});
    }
  }
}

// The work is divided into parts of some rows and up to kPartPages pages. Each round computes as
// many parts as there are slots and adds them to the output in order, so the sum of a row is formed
// in an order that depends on its position alone, not on other rows or the number of threads.
void CpuOps::mla_absorbed(const MlaArgs& a) {
  const size_t n_slots = part_out_.rows / kPartRows;
  int64_t n_rows = 0, n_splits = 1;
  for (const Sequence& s : a.sequences) {
    n_rows += int64_t{s.n_tokens} * a.mla.n_heads;
    n_splits = std::max<int64_t>(n_splits, ceil_div(n_pages(s), kPartPages));
  }
  const int part_rows = rows_of_part(n_rows, n_splits, team_.size());
  for (const Sequence& s : a.sequences) {
    const int rows = s.n_tokens * a.mla.n_heads;
    for (int row = 0; row < rows; row += part_rows) {
      for (int page = 0; page < n_pages(s); page += kPartPages) {
        const int pages = std::min(kPartPages, n_pages(s) - page);
        parts_.push_back({&s, row, std::min(part_rows, rows - row), page, pages, page == 0,
                          page + pages == n_pages(s)});
        if (parts_.size() == n_slots) run_parts(a);
      }
    }
  }
  run_parts(a);
}

void CpuOps::run_parts(const MlaArgs& a) {
  team_.run(static_cast<int64_t>(parts_.size()),
            [&](int64_t i, int) { attend_part(a, parts_[i], i); });
  constexpr int kShares = 16;
  team_.run(kShares, [&](int64_t share, int) {
    for (size_t slot = 0; slot < parts_.size(); ++slot)
      for (int i = static_cast<int>(share); i < parts_[slot].n_rows; i += kShares)
        merge_row(a, parts_[slot], static_cast<int64_t>(slot), i);
  });
  parts_.clear();
}

void CpuOps::attend_part(const MlaArgs& a, const AbsorbedPart& part, int64_t slot) {
  const Sequence& s = *part.sequence;
  const TensorView out = part_out_.rows_from(slot * kPartRows, part.n_rows);
  float* const max = part_max_.row<float>(0) + slot * kPartRows;
  float* const sum = part_sum_.row<float>(0) + slot * kPartRows;
  const int heads = a.mla.n_heads, rank = a.mla.kv_rank;
  const int64_t row = int64_t{s.first_token} * heads + part.first_row;
  std::fill_n(max, part.n_rows, kNoMax);
  std::fill_n(sum, part.n_rows, 0.f);
  for (int i = 0; i < part.n_rows; ++i) std::fill_n(out.row<float>(i), rank, 0.f);

  cpu::KeyBlock blocks[kPartPages];
  for (int p = 0; p < part.n_pages; ++p) {
    const TensorView keys = page_of(a, s, part.first_page + p);
    blocks[p] = {keys.data, keys.cols_from(rank, a.mla.rope_dim).data, keys.data,
                 static_cast<int>(keys.rows), visible(s, (part.first_page + p) * kPageSize)};
  }
  kernels_.attend({.type = type_of(a.cache),
                   .q = a.q.row<float>(row),
                   .q_rope = a.q_rope.row<float>(row),
                   .q_stride = a.q.stride,
                   .q_rope_stride = a.q_rope.stride,
                   .blocks = blocks,
                   .n_blocks = part.n_pages,
                   .k_stride = a.cache.row_bytes(),
                   .k_rope_stride = a.cache.row_bytes(),
                   .v_stride = a.cache.row_bytes(),
                   .n_queries = part.n_rows,
                   .dim = rank,
                   .rope_dim = a.mla.rope_dim,
                   .v_dim = rank,
                   .first_query = part.first_row,
                   .queries_per_token = heads,
                   .scale = a.softmax_scale,
                   .out = out.row<float>(0),
                   .out_stride = out.stride,
                   .max = max,
                   .sum = sum});
}

// Adds row i of a part to the output. Both are sums of exp(score - max) v over their keys.
void CpuOps::merge_row(const MlaArgs& a, const AbsorbedPart& part, int64_t slot, int i) {
  const int64_t rank = a.mla.kv_rank;
  const int64_t row = int64_t{part.sequence->first_token} * a.mla.n_heads + part.first_row + i;
  float* const out = a.out.row<float>(row);
  float& max = max_.row<float>(0)[row];
  float& sum = sum_.row<float>(0)[row];
  const float* const added = part_out_.row<float>(slot * kPartRows + i);
  const float added_max = part_max_.row<float>(0)[slot * kPartRows + i];
  const float added_sum = part_sum_.row<float>(0)[slot * kPartRows + i];
  if (part.is_first) {
    std::copy_n(added, rank, out);
    max = added_max;
    sum = added_sum;
  } else if (added_sum > 0) {
    const float top = std::max(max, added_max);
    const float keep = std::exp(max - top), take = std::exp(added_max - top);
    for (int64_t c = 0; c < rank; ++c) out[c] = out[c] * keep + added[c] * take;
    sum = sum * keep + added_sum * take;
    max = top;
  }
  if (part.is_last) divide(out, rank, sum);
}

// A work item is one head. Its keys and values are restored for kRestoredPages at a time, which fit
// the thread's cache, so kv_b is read and every query packed once for all of them. When there are
// more threads than heads, threads share the tokens of a head and each restores it.
void CpuOps::mla_naive(const MlaArgs& a, const QuantView& kv_b) {
  const int heads = a.mla.n_heads;
  for (const Sequence& s : a.sequences) {
    const int n_pieces = ceil_div(s.n_tokens, kPartRows);
    const int n_shares = std::min(n_pieces, ceil_div(team_.size(), heads));
    for (int page = 0; page < n_pages(s); page += kRestoredPages) {
      const int n_tokens = std::min(kRestoredTokens, s.kv_length - page * kPageSize);
      const cpu::Activations latents = latents_of(a, s, page, kv_b);
      team_.run(int64_t{heads} * n_shares, [&](int64_t i, int thread) {
        const int head = static_cast<int>(i / n_shares), share = static_cast<int>(i % n_shares);
        const TensorView restored = restore_head(a, latents, n_tokens, kv_b, head, thread);
        for (int piece = share; piece < n_pieces; piece += n_shares)
          naive_rows(a, s, restored, page, head, piece * kPartRows);
      });
    }
  }
}

// The latents of kRestoredPages from `page` on, encoded as the fastest product with kv_b needs
// them.
cpu::Activations CpuOps::latents_of(const MlaArgs& a, const Sequence& s, int page,
                                    const QuantView& kv_b) {
  const ActivationType type = activation_for(kernels_, kv_b.q.dtype);
  const DType dtype = type == ActivationType::kF32 ? DType::kF32 : DType::kBF16;
  const TensorView to = {latents_.data, latents_.rows, latents_.cols, latents_.cols, dtype};
  const int rank = a.mla.kv_rank, first = page * kPageSize;
  const int n = std::min(kRestoredTokens, s.kv_length - first);
  for_each(n, int64_t{n} * rank, [&](int64_t i, int) {
    const TensorView row = a.cache.rows_from(cache_row(s, first + static_cast<int>(i)), 1);
    if (type == ActivationType::kF32) {
      kernels_.decode({row.data, kernel_type(row.dtype), to.row<float>(i), rank});
    } else if (row.dtype == DType::kF32) {
      kernels_.encode({row.row<float>(0), rank, type, to.row_data(i)});
    } else {
      cpu::bf16* const columns = std::copy_n(row.row<cpu::bf16>(0), rank, to.row<cpu::bf16>(i));
      std::fill_n(columns, to.cols - rank, cpu::bf16{0});
    }
  });
  return {to.data, to.row_bytes(), type};
}

// Restores the keys and values of one head in the type of the cache.
TensorView CpuOps::restore_head(const MlaArgs& a, const cpu::Activations& latents, int n_tokens,
                                const QuantView& kv_b, int head, int thread) {
  const int cols = a.mla.nope_dim + a.mla.v_dim;
  const TensorView own = keys_values_.rows_from(int64_t{thread} * kRestoredTokens, n_tokens);
  const TensorView out = {own.data, n_tokens, cols, cols, a.cache.dtype};
  for (int first = 0; first < n_tokens; first += kRestoredRows) {
    const int n = std::min(kRestoredRows, n_tokens - first);
    const bool as_is = out.dtype == DType::kF32;
    const TensorView rows =
        as_is ? out.rows_from(first, n) : restored_.rows_from(int64_t{thread} * kRestoredRows, n);
    cpu::Activations x = latents;
    x.data = static_cast<const std::byte*>(x.data) + first * x.stride;
    kernels_.gemm({.x = x,
                   .w = kernel_weight(kv_b),
                   .first_row = int64_t{head} * cols,
                   .out = rows.row<float>(0),
                   .out_stride = rows.stride,
                   .m = n,
                   .n = cols,
                   .k = static_cast<int>(kv_b.q.cols)});
    if (!as_is)
      for (int r = 0; r < n; ++r)
        kernels_.encode_bf16({rows.row<float>(r), out.row<cpu::bf16>(first + r), cols});
  }
  return out;
}

// Attention of one head for up to kPartRows tokens of one sequence from `token` on, with the keys
// and values restored from `page` on. Row t * heads + head belongs to token t.
void CpuOps::naive_rows(const MlaArgs& a, const Sequence& s, TensorView restored, int page,
                        int head, int token) {
  const MlaConfig& m = a.mla;
  const int n = std::min(kPartRows, s.n_tokens - token);
  const int64_t first_row = (int64_t{s.first_token} + token) * m.n_heads + head;
  const auto row = [&](int i) { return first_row + int64_t{i} * m.n_heads; };
  float *const maxima = max_.row<float>(0), *const sums = sum_.row<float>(0);
  float max[kPartRows], sum[kPartRows];
  for (int i = 0; i < n; ++i) {
    max[i] = page == 0 ? kNoMax : maxima[row(i)];
    sum[i] = page == 0 ? 0 : sums[row(i)];
    if (page == 0) std::fill_n(a.out.row<float>(row(i)), m.v_dim, 0.f);
  }

  cpu::KeyBlock blocks[kRestoredPages];
  int n_blocks = 0;
  for (int64_t r = 0; r < restored.rows; r += kPageSize, ++page) {
    const TensorView keys = page_of(a, s, page);
    const TensorView own = restored.rows_from(r, keys.rows);
    blocks[n_blocks++] = {own.cols_from(0, m.nope_dim).data,
                          keys.cols_from(m.kv_rank, m.rope_dim).data,
                          own.cols_from(m.nope_dim, m.v_dim).data, static_cast<int>(keys.rows),
                          visible(s, page * kPageSize)};
  }
  kernels_.attend({.type = type_of(restored),
                   .q = a.q.row<float>(first_row),
                   .q_rope = a.q_rope.row<float>(first_row),
                   .q_stride = a.q.stride * m.n_heads,
                   .q_rope_stride = a.q_rope.stride * m.n_heads,
                   .blocks = blocks,
                   .n_blocks = n_blocks,
                   .k_stride = restored.row_bytes(),
                   .k_rope_stride = a.cache.row_bytes(),
                   .v_stride = restored.row_bytes(),
                   .n_queries = n,
                   .dim = m.nope_dim,
                   .rope_dim = m.rope_dim,
                   .v_dim = m.v_dim,
                   .first_query = token,
                   .queries_per_token = 1,
                   .scale = a.softmax_scale,
                   .out = a.out.row<float>(first_row),
                   .out_stride = a.out.stride * m.n_heads,
                   .max = max,
                   .sum = sum});
  const bool is_last = page == n_pages(s);
  for (int i = 0; i < n; ++i) {
    maxima[row(i)] = max[i];
    sums[row(i)] = sum[i];
    if (is_last) divide(a.out.row<float>(row(i)), m.v_dim, sum[i]);
  }
}

}  // namespace tandem
