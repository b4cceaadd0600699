// Matrix products with AVX2, FMA and F16C. Weights are decoded to float in a block that stays in
// the level-1 cache and is used there for all rows of x. Compiled with -ffp-contract=off: a product
// and a sum fuse only in _mm256_fmadd_ps.
#include "cpu_kernels/avx2_lanes.h"

namespace tandem::cpu {
namespace {

constexpr int kRows = 8;     // rows of w decoded together
constexpr int kChunk = 512;  // columns of them: 16 KiB of float

// to[0..n) = w[row][col .. col + n)
void decode_row(const Weight& w, int64_t row, int col, int n, float* to) {
  const char* data = static_cast<const char*>(w.data) + row * w.stride;
  if (!w.scales) return widen(data, w.type, col, n, 1, to);
  const float* scales = w.scales + (w.row0 + row) / w.block_rows * w.scale_stride;
  for (int c = 0; c < n;) {
    const int at = w.col0 + col + c;
    const int run = min(n - c, w.block_cols - at % w.block_cols);
    widen(data, w.type, col + c, run, scales[at / w.block_cols], to + c);
    c += run;
  }
}

// ------------------------------------------------------------------------------------------------------

// out[i][j] += x[i] . w[j] for M rows of x and N rows of decoded w.
template <int M, int N>
void tile(const float* const* x, const float* w, int n, float* out, int64_t out_stride) {
  __m256 acc[M][N] = {};
  accumulate<M, N>(x, w, kChunk, n, acc);
  for (int i = 0; i < M; ++i) {
    float* o = out + i * out_stride;
    if constexpr (N % 4 == 0) {
      for (int j = 0; j < N; j += 4) {
        const __m128 sums = sum_lanes(acc[i][j], acc[i][j + 1], acc[i][j + 2], acc[i][j + 3]);
        _mm_storeu_ps(o + j, _mm_add_ps(_mm_loadu_ps(o + j), sums));
      }
    } else {
      for (int j = 0; j < N; ++j) o[j] += sum_lanes(acc[i][j]);
    }
  }
}

template <int M>
void tiles_of_row(const float* const* x, const float (*w)[kChunk], int n_rows, int n, float* out,
                  int64_t out_stride) {
  int j = 0;
  if constexpr (M == 1)
    for (; j + 8 <= n_rows; j += 8) tile<1, 8>(x, w[j], n, out + j, out_stride);
  for (; j + 4 <= n_rows; j += 4) tile<M, 4>(x, w[j], n, out + j, out_stride);
  for (; j < n_rows; ++j) tile<M, 1>(x, w[j], n, out + j, out_stride);
}

const float* x_row(const GemmArgs& a, int i) {
  const int64_t row = a.x.rows ? a.x.rows[i] : i;
  return reinterpret_cast<const float*>(static_cast<const char*>(a.x.data) + row * a.x.stride);
}

void gemm(const GemmArgs& a) {
  alignas(32) float w[kRows][kChunk];
  for (int i = 0; i < a.m; ++i) __builtin_memset(a.out + i * a.out_stride, 0, a.n * sizeof(float));

  for (int j = 0; j < a.n; j += kRows) {
    const int n_rows = min(kRows, a.n - j);
    for (int c = 0; c < a.k; c += kChunk) {
      const int n = min(kChunk, a.k - c);
      for (int r = 0; r < n_rows; ++r) decode_row(a.w, a.first_row + j + r, c, n, w[r]);
      for (int i = 0; i < a.m; i += 3) {
        const int rows = min(3, a.m - i);
        const float* x[3];
        for (int r = 0; r < rows; ++r) x[r] = x_row(a, i + r) + c;
        float* out = a.out + i * a.out_stride + j;
        if (rows == 3) tiles_of_row<3>(x, w, n_rows, n, out, a.out_stride);
        if (rows == 2) tiles_of_row<2>(x, w, n_rows, n, out, a.out_stride);
        if (rows == 1) tiles_of_row<1>(x, w, n_rows, n, out, a.out_stride);
      }
    }
  }
}

// A strip of 64 columns and up to 64 rows of w is decoded at a time: 16 KiB. Padding columns are
// zero.
void gemm_transposed(const GemmArgs& a) {
  constexpr int kStrip = 64;
  alignas(32) float w[kStrip][kStrip] = {};
  for (int i = 0; i < a.m; ++i) __builtin_memset(a.out + i * a.out_stride, 0, a.k * sizeof(float));

  for (int c = 0; c < a.k; c += kStrip) {
    const int width = min(kStrip, a.k - c);
    for (int j = 0; j < a.n; j += kStrip) {
      const int n_rows = min(kStrip, a.n - j);
      for (int r = 0; r < n_rows; ++r) {
        for (int p = width / kLanes * kLanes; p < kStrip; ++p) w[r][p] = 0;
        decode_row(a.w, a.first_row + j + r, c, width, w[r]);
      }
      for (int i = 0; i < a.m; ++i) {
        const float* x = x_row(a, i) + j;
        float* out = a.out + i * a.out_stride + c;
        for (int v = 0; v < width; v += kLanes) {
          const __m256i mask = lane_mask(width - v);
          __m256 sum = _mm256_maskload_ps(out + v, mask);
          for (int r = 0; r < n_rows; ++r)
            sum = _mm256_fmadd_ps(_mm256_broadcast_ss(x + r), _mm256_load_ps(w[r] + v), sum);
          _mm256_maskstore_ps(out + v, mask, sum);
        }
      }
    }
  }
}

// -----------------------------------------------------------------------------------------

}  // namespace

// Keeps the reference's pack: rows as stored.
void install_avx2_products(KernelTable& t) {
  t.gemm = gemm;
  t.gemm_transposed = gemm_transposed;
}

}  // namespace tandem::cpu
