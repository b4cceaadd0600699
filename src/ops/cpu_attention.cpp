// Multi-head latent attention on the CPU, both forms, over pages of the latent cache.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/cpu_ops.h"
#include "ops/cpu_weights.h"

namespace tandem {
namespace {

using cpu::ActivationType;

constexpr int kPartPages = 32;  // of one sequence that a thread takes at a time: 2048 tokens
constexpr float kNoMax = -std::numeric_limits<float>::infinity();

int n_pages(const Sequence& s) { return (s.kv_length + kPageSize - 1) / kPageSize; }

int64_t cache_row(const Sequence& s, int position) {
  return int64_t{s.kv_pages[position / kPageSize]} * kPageSize + position % kPageSize;
}

// What a token at the first position of the step sees of the keys from first_key on.
int visible(const Sequence& s, int first_key) { return s.kv_length - s.n_tokens + 1 - first_key; }

void divide(float* out, int64_t n, float sum) {
  for (int64_t i = 0; i < n; ++i) out[i] /= sum;
}

// Rows of a part: as many as make the packing of keys cheap, fewer if that leaves threads idle.
int rows_of_part(int64_t n_rows, int64_t n_splits, int n_threads) {
  int rows = kPartRows;
  while (rows > 16 && (n_rows + rows - 1) / rows * n_splits < 4 * n_threads) rows /= 2;
  return rows;
}

}  // namespace

void CpuOps::append_kv(const Batch& batch, TensorView kv, TensorView cache) {
  for (const Sequence& s : batch.sequences) {
    for (int t = s.first_token; t < s.first_token + s.n_tokens; ++t) {
      const int64_t row = cache_row(s, batch.positions[t]);
      if (cache.dtype == DType::kF32)
        std::copy_n(kv.row<float>(t), kv.cols, cache.row<float>(row));
      else
        kernels_.encode_bf16({kv.row<float>(t), cache.row<cpu::bf16>(row), kv.cols});
    }
  }
}

// The rows of one page that hold tokens of `s`, in the type that attention reads; in `room` unless
// the cache itself has it.
TensorView CpuOps::read_page(const MlaArgs& a, const Sequence& s, int page, TensorView room) const {
  const int first = page * kPageSize;
  const int n = std::min(kPageSize, s.kv_length - first);
  const TensorView stored = a.cache.rows_from(cache_row(s, first), n);
  const DType wanted = attention_ == ActivationType::kF32 ? DType::kF32 : DType::kBF16;
  if (stored.dtype == wanted) return stored;
  TensorView read{room.data, n, stored.cols, stored.cols, wanted};
  if (wanted == DType::kF32) {
    kernels_.decode({stored.data, cpu::WeightType::kBF16, read.row<float>(0), n * stored.cols});
  } else {
    kernels_.encode_bf16({stored.row<float>(0), read.row<cpu::bf16>(0), n * stored.cols});
  }
  return read;
}

// Rows first, first + step, .. of x as attention reads them; encoded ones go into the thread's
// room, from `column` on.
cpu::Activations CpuOps::queries(TensorView x, int64_t first, int64_t step, int n, int thread,
                                 int64_t column) {
  if (attention_ == ActivationType::kF32)
    return {x.row_data(first), x.row_bytes() * step, attention_};
  const TensorView room =
      queries_of_thread_.rows_from(int64_t{thread} * kPartRows, n).cols_from(column, x.cols);
  for (int i = 0; i < n; ++i)
    kernels_.encode(
        {x.row<float>(first + i * step), static_cast<int>(x.cols), attention_, room.row_data(i)});
  return {room.data, room.row_bytes(), attention_};
}

// ------------------------------------------------------------------------------- absorbed

// The work is cut into parts, some rows and up to kPartPages pages each. A round computes as many
// parts as there are slots and adds them to the output in order: the sum of one row is formed in an
// order that depends on its position alone, whatever the rows beside it and the threads.
void CpuOps::mla_absorbed(const MlaArgs& a) {
  const size_t n_slots = part_out_.rows / kPartRows;
  int64_t n_rows = 0, n_splits = 1;
  for (const Sequence& s : a.sequences) {
    n_rows += int64_t{s.n_tokens} * a.mla.n_heads;
    n_splits = std::max<int64_t>(n_splits, (n_pages(s) + kPartPages - 1) / kPartPages);
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
            [&](int64_t i, int thread) { attend_part(a, parts_[i], i, thread); });
  constexpr int kShares = 16;
  team_.run(kShares, [&](int64_t share, int) {
    for (size_t slot = 0; slot < parts_.size(); ++slot)
      for (int i = static_cast<int>(share); i < parts_[slot].n_rows; i += kShares)
        merge_row(a, parts_[slot], static_cast<int64_t>(slot), i);
  });
  parts_.clear();
}

void CpuOps::attend_part(const MlaArgs& a, const AbsorbedPart& part, int64_t slot, int thread) {
  const Sequence& s = *part.sequence;
  const TensorView room = page_of_thread_.rows_from(int64_t{thread} * kPageSize, kPageSize);
  const TensorView out = part_out_.rows_from(slot * kPartRows, part.n_rows);
  float* const max = part_max_.row<float>(0) + slot * kPartRows;
  float* const sum = part_sum_.row<float>(0) + slot * kPartRows;
  const int heads = a.mla.n_heads, rank = a.mla.kv_rank;
  const int64_t row = int64_t{s.first_token} * heads + part.first_row;
  const int last_token = (part.first_row + part.n_rows - 1) / heads;
  std::fill_n(max, part.n_rows, kNoMax);
  std::fill_n(sum, part.n_rows, 0.f);
  for (int i = 0; i < part.n_rows; ++i) std::fill_n(out.row<float>(i), rank, 0.f);

  const cpu::Activations q = queries(a.q, row, 1, part.n_rows, thread, 0);
  const cpu::Activations q_rope =
      queries(a.q_rope, row, 1, part.n_rows, thread, encoded_columns(rank));
  for (int page = part.first_page; page < part.first_page + part.n_pages; ++page) {
    const int first_key = page * kPageSize;
    if (visible(s, first_key) + last_token <= 0) break;
    const TensorView keys = read_page(a, s, page, room);
    const TensorView rope_keys = keys.cols_from(rank, a.mla.rope_dim);
    kernels_.attend({.type = attention_,
                     .q = q.data,
                     .q_rope = q_rope.data,
                     .k = keys.data,
                     .k_rope = rope_keys.data,
                     .v = keys.data,
                     .q_stride = q.stride,
                     .q_rope_stride = q_rope.stride,
                     .k_stride = keys.row_bytes(),
                     .k_rope_stride = keys.row_bytes(),
                     .v_stride = keys.row_bytes(),
                     .n_queries = part.n_rows,
                     .n_keys = static_cast<int>(keys.rows),
                     .dim = rank,
                     .rope_dim = a.mla.rope_dim,
                     .v_dim = rank,
                     .visible = visible(s, first_key),
                     .first_query = part.first_row,
                     .queries_per_token = heads,
                     .scale = a.softmax_scale,
                     .out = out.row<float>(0),
                     .out_stride = out.stride,
                     .max = max,
                     .sum = sum});
  }
}

// Adds row i of a part to the output: both are sums of exp(score - max) v over their keys.
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

// ---------------------------------------------------------------------------------- naive

void CpuOps::mla_naive(const MlaArgs& a, const QuantView& kv_b) {
  const int heads = a.mla.n_heads;
  for (const Sequence& s : a.sequences) {
    const int64_t first = int64_t{s.first_token} * heads, rows = int64_t{s.n_tokens} * heads;
    std::fill_n(max_.row<float>(0) + first, rows, kNoMax);
    std::fill_n(sum_.row<float>(0) + first, rows, 0.f);
    for (int64_t r = first; r < first + rows; ++r)
      std::fill_n(a.out.row<float>(r), a.mla.v_dim, 0.f);

    for (int page = 0; page < n_pages(s); ++page) {
      const TensorView keys = read_page(a, s, page, shared_page_);
      const TensorView restored = restore_page(keys, kv_b);
      team_.run(heads, [&](int64_t head, int thread) {
        naive_rows(a, s, keys, restored, page * kPageSize, static_cast<int>(head), thread);
      });
    }
    for (int64_t r = first; r < first + rows; ++r)
      divide(a.out.row<float>(r), a.mla.v_dim, sum_.row<float>(0)[r]);
  }
}

// Keys and values of every head for the latents of one page, as attention reads them.
TensorView CpuOps::restore_page(TensorView page, const QuantView& kv_b) {
  const TensorView latents = page.cols_from(0, kv_b.q.cols);
  const TensorView restored = restored_.rows_from(0, page.rows);
  if (attention_ == ActivationType::kF32) {
    linear(latents, kv_b, restored);
    return restored;
  }
  if (kernels_.activation[static_cast<int>(kernel_type(kv_b.q.dtype))] == attention_) {
    product({latents.data, latents.row_bytes(), attention_}, page.rows, kv_b, restored);
  } else {
    const TensorView wide = page_of_thread_.rows_from(0, page.rows);
    kernels_.decode({page.data, cpu::WeightType::kBF16, wide.row<float>(0), page.rows * page.cols});
    linear(wide.cols_from(0, latents.cols), kv_b, restored);
  }
  const TensorView encoded = encoded_restored_.rows_from(0, page.rows);
  for_each(page.rows, restored.rows * restored.cols, [&](int64_t r, int) {
    kernels_.encode_bf16({restored.row<float>(r), encoded.row<cpu::bf16>(r), restored.cols});
  });
  return encoded;
}

// All tokens of one sequence, one head, one page. Row t * heads + head belongs to token t.
void CpuOps::naive_rows(const MlaArgs& a, const Sequence& s, TensorView page, TensorView restored,
                        int first_key, int head, int thread) {
  const MlaConfig& m = a.mla;
  const int64_t row = int64_t{s.first_token} * m.n_heads + head;
  const int64_t first_column = int64_t{head} * (m.nope_dim + m.v_dim);
  const TensorView k = restored.cols_from(first_column, m.nope_dim);
  const TensorView v = restored.cols_from(first_column + m.nope_dim, m.v_dim);
  const TensorView k_rope = page.cols_from(m.kv_rank, m.rope_dim);
  float max[kPartRows], sum[kPartRows];
  for (int t = 0; t < s.n_tokens; t += kPartRows) {
    const int n = std::min(kPartRows, s.n_tokens - t);
    if (visible(s, first_key) + t + n - 1 <= 0) continue;
    const int64_t at = row + int64_t{t} * m.n_heads;
    for (int i = 0; i < n; ++i) {
      max[i] = max_.row<float>(0)[at + int64_t{i} * m.n_heads];
      sum[i] = sum_.row<float>(0)[at + int64_t{i} * m.n_heads];
    }
    const cpu::Activations q = queries(a.q, at, m.n_heads, n, thread, 0);
    const cpu::Activations q_rope =
        queries(a.q_rope, at, m.n_heads, n, thread, encoded_columns(m.nope_dim));
    kernels_.attend({.type = attention_,
                     .q = q.data,
                     .q_rope = q_rope.data,
                     .k = k.data,
                     .k_rope = k_rope.data,
                     .v = v.data,
                     .q_stride = q.stride,
                     .q_rope_stride = q_rope.stride,
                     .k_stride = k.row_bytes(),
                     .k_rope_stride = k_rope.row_bytes(),
                     .v_stride = v.row_bytes(),
                     .n_queries = n,
                     .n_keys = static_cast<int>(page.rows),
                     .dim = m.nope_dim,
                     .rope_dim = m.rope_dim,
                     .v_dim = m.v_dim,
                     .visible = visible(s, first_key),
                     .first_query = t,
                     .queries_per_token = 1,
                     .scale = a.softmax_scale,
                     .out = a.out.row<float>(at),
                     .out_stride = a.out.stride * m.n_heads,
                     .max = max,
                     .sum = sum});
    for (int i = 0; i < n; ++i) {
      max_.row<float>(0)[at + int64_t{i} * m.n_heads] = max[i];
      sum_.row<float>(0)[at + int64_t{i} * m.n_heads] = sum[i];
    }
  }
}

}  // namespace tandem
