// Multi-head latent attention on the CPU, both forms, over pages of the latent cache.
#include <algorithm>
#include <limits>

#include "ops/cpu_ops.h"
#include "ops/cpu_weights.h"

namespace tandem {
namespace {

constexpr int kQueryRows = 32;  // (token, head) rows of one sequence that a thread takes at a time

int n_pages(const Sequence& s) { return (s.kv_length + kPageSize - 1) / kPageSize; }

int64_t cache_row(const Sequence& s, int position) {
  return int64_t{s.kv_pages[position / kPageSize]} * kPageSize + position % kPageSize;
}

// What a token at the first position of the step sees of the keys from first_key on.
int visible(const Sequence& s, int first_key) { return s.kv_length - s.n_tokens + 1 - first_key; }

void divide(float* out, int64_t n, float sum) {
  for (int64_t i = 0; i < n; ++i) out[i] /= sum;
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

// The rows of one page that hold tokens of `s`, as floats; in `room` unless the cache itself is
// float.
TensorView CpuOps::read_page(const MlaArgs& a, const Sequence& s, int page, TensorView room) const {
  const int first = page * kPageSize;
  const int n = std::min(kPageSize, s.kv_length - first);
  const TensorView stored = a.cache.rows_from(cache_row(s, first), n);
  if (stored.dtype == DType::kF32) return stored;
  kernels_.decode({stored.data, cpu::WeightType::kBF16, room.row<float>(0), n * stored.cols});
  return room.rows_from(0, n);
}

void CpuOps::mla_absorbed(const MlaArgs& a) {
  for (const Sequence& s : a.sequences) {
    const int rows = s.n_tokens * a.mla.n_heads;
    const int piece = std::clamp(rows / (4 * team_.size()), 8, kQueryRows);
    team_.run((rows + piece - 1) / piece, [&](int64_t i, int thread) {
      const int first = static_cast<int>(i) * piece;
      absorbed_rows(a, s, first, std::min(piece, rows - first), thread);
    });
  }
}

// Some (token, head) rows of one sequence, over all of its pages.
void CpuOps::absorbed_rows(const MlaArgs& a, const Sequence& s, int first_row, int n_rows,
                           int thread) {
  const TensorView room = page_of_thread_.rows_from(int64_t{thread} * kPageSize, kPageSize);
  const int heads = a.mla.n_heads, rank = a.mla.kv_rank;
  const int64_t row = int64_t{s.first_token} * heads + first_row;
  const int last_token = (first_row + n_rows - 1) / heads;
  float max[kQueryRows], sum[kQueryRows] = {};
  std::fill_n(max, n_rows, -std::numeric_limits<float>::infinity());
  for (int i = 0; i < n_rows; ++i) std::fill_n(a.out.row<float>(row + i), rank, 0.f);

  for (int page = 0; page < n_pages(s); ++page) {
    const int first_key = page * kPageSize;
    if (visible(s, first_key) + last_token <= 0) break;
    const TensorView keys = read_page(a, s, page, room);
    kernels_.attend({.q = a.q.row<float>(row),
                     .q_rope = a.q_rope.row<float>(row),
                     .q_stride = a.q.stride,
                     .q_rope_stride = a.q_rope.stride,
                     .k = keys.row<float>(0),
                     .k_rope = keys.row<float>(0) + rank,
                     .k_stride = keys.stride,
                     .k_rope_stride = keys.stride,
                     .v = keys.row<float>(0),
                     .v_stride = keys.stride,
                     .n_queries = n_rows,
                     .n_keys = static_cast<int>(keys.rows),
                     .dim = rank,
                     .rope_dim = a.mla.rope_dim,
                     .v_dim = rank,
                     .visible = visible(s, first_key),
                     .first_query = first_row,
                     .queries_per_token = heads,
                     .scale = a.softmax_scale,
                     .out = a.out.row<float>(row),
                     .out_stride = a.out.stride,
                     .max = max,
                     .sum = sum});
  }
  for (int i = 0; i < n_rows; ++i) divide(a.out.row<float>(row + i), rank, sum[i]);
}

void CpuOps::mla_naive(const MlaArgs& a, const QuantView& kv_b) {
  const int heads = a.mla.n_heads;
  for (const Sequence& s : a.sequences) {
    const int64_t first = int64_t{s.first_token} * heads, rows = int64_t{s.n_tokens} * heads;
    std::fill_n(max_.row<float>(0) + first, rows, -std::numeric_limits<float>::infinity());
    std::fill_n(sum_.row<float>(0) + first, rows, 0.f);
    for (int64_t r = first; r < first + rows; ++r)
      std::fill_n(a.out.row<float>(r), a.mla.v_dim, 0.f);

    for (int page = 0; page < n_pages(s); ++page) {
      const TensorView keys = read_page(a, s, page, shared_page_);
      restore_page(a, kv_b, keys);
      team_.run(heads, [&](int64_t head, int) {
        naive_rows(a, s, keys, page * kPageSize, static_cast<int>(head));
      });
    }
    for (int64_t r = first; r < first + rows; ++r)
      divide(a.out.row<float>(r), a.mla.v_dim, sum_.row<float>(0)[r]);
  }
}

// Keys and values of every head for the latents of one page.
void CpuOps::restore_page(const MlaArgs& a, const QuantView& kv_b, TensorView page) {
  linear(page.cols_from(0, a.mla.kv_rank), kv_b, restored_.rows_from(0, page.rows));
}

// All tokens of one sequence, one head, one page. Row t * heads + head belongs to token t.
void CpuOps::naive_rows(const MlaArgs& a, const Sequence& s, TensorView page, int first_key,
                        int head) {
  const MlaConfig& m = a.mla;
  const int64_t row = int64_t{s.first_token} * m.n_heads + head;
  const float* k = restored_.row<float>(0) + int64_t{head} * (m.nope_dim + m.v_dim);
  float max[kPageSize], sum[kPageSize];
  for (int t = 0; t < s.n_tokens; t += kPageSize) {
    const int n = std::min(kPageSize, s.n_tokens - t);
    const int64_t at = row + int64_t{t} * m.n_heads;
    for (int i = 0; i < n; ++i) {
      max[i] = max_.row<float>(0)[at + int64_t{i} * m.n_heads];
      sum[i] = sum_.row<float>(0)[at + int64_t{i} * m.n_heads];
    }
    kernels_.attend({.q = a.q.row<float>(at),
                     .q_rope = a.q_rope.row<float>(at),
                     .q_stride = a.q.stride * m.n_heads,
                     .q_rope_stride = a.q_rope.stride * m.n_heads,
                     .k = k,
                     .k_rope = page.row<float>(0) + m.kv_rank,
                     .k_stride = restored_.stride,
                     .k_rope_stride = page.stride,
                     .v = k + m.nope_dim,
                     .v_stride = restored_.stride,
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
