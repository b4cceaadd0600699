// Rows that travel between ranks (kernels.h, EncodeFp8Args and AddRowsArgs), with AVX2 and F16C.
#include "cpu_kernels/avx2/lanes.h"
#include "cpu_kernels/fp8_rows.h"

namespace tandem::cpu {
namespace {

__m256i size_of(__m256i bits) { return _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)); }

// Eight sizes as E4M3 codes + kCodeOffset, [8 of 32 bits] (fp8_rows.h).
__m256i codes_of(__m256i size) {
  size = _mm256_min_epi32(size, _mm256_set1_epi32(bits_of(448)));
  const __m256i power =
      _mm256_max_epi32(_mm256_and_si256(size, _mm256_set1_epi32(bits_of(__builtin_inff()))),
                       _mm256_set1_epi32(bits_of(0x1p-6f)));
  const __m256i rounded = _mm256_castps_si256(_mm256_fmadd_ps(
      _mm256_castsi256_ps(power), _mm256_set1_ps(0x1p20f), _mm256_castsi256_ps(size)));
  return _mm256_add_epi32(_mm256_and_si256(rounded, _mm256_set1_epi32(31)),
                          _mm256_srli_epi32(rounded, 20));
}

__m256i without_offset(__m256i a, __m256i b) {
  return _mm256_sub_epi16(_mm256_packs_epi32(a, b), _mm256_set1_epi16(kCodeOffset));
}

// 32 numbers times `inverse`.
__m256i encode(const float* from, __m256 inverse) {
  __m256i x[4], codes[4];
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm256_castps_si256(_mm256_mul_ps(_mm256_loadu_ps(from + i * kLanes), inverse));
    codes[i] = codes_of(size_of(x[i]));
  }
  const __m256i size = _mm256_packus_epi16(without_offset(codes[0], codes[1]),  //
                                           without_offset(codes[2], codes[3]));
  // Narrowing keeps signs.
  const __m256i sign = _mm256_and_si256(_mm256_packs_epi16(_mm256_packs_epi32(x[0], x[1]),  //
                                                           _mm256_packs_epi32(x[2], x[3])),
                                        _mm256_set1_epi8(static_cast<char>(0x80)));
  return _mm256_permutevar8x32_epi32(_mm256_or_si256(size, sign),
                                     _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

int max_lane(__m256i v) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epi32(m, _mm_unpackhi_epi64(m, m));
  return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 1)));
}

float largest_of(const float* from) {
  __m256i sizes[4] = {};
  for (int c = 0; c < kScaledColumns; c += 4 * kLanes)
    for (int i = 0; i < 4; ++i) {
      const __m256 x = _mm256_loadu_ps(from + c + i * kLanes);
      sizes[i] = _mm256_max_epi32(sizes[i], size_of(_mm256_castps_si256(x)));
    }
  const int size = max_lane(
      _mm256_max_epi32(_mm256_max_epi32(sizes[0], sizes[1]), _mm256_max_epi32(sizes[2], sizes[3])));
  return __builtin_bit_cast(float, size);
}

void encode_block(const float* from, float inverse, uint8_t* codes) {
  for (int c = 0; c < kScaledColumns; c += 4 * kLanes)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + c),
                        encode(from + c, _mm256_set1_ps(inverse)));
}

// 16 codes. Their bits, moved to those of half precision, read as 2^-8 times the value; `unit` is
// 2^8 times the scale, so that each number is rounded once.
void decode(const uint8_t* codes, __m256 unit, float* to) {
  const __m256i wide =
      _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m256i size = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7);
  const __m256i sign = _mm256_and_si256(wide, _mm256_set1_epi16(static_cast<short>(0x8000)));
  const __m256i halves = _mm256_or_si256(size, sign);
  const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
  _mm256_storeu_ps(to, _mm256_mul_ps(low, unit));
  _mm256_storeu_ps(to + kLanes, _mm256_mul_ps(high, unit));
}

void decode_block(const uint8_t* codes, float scale, float* to) {
  const __m256 unit = _mm256_set1_ps(256 * scale);
  for (int c = 0; c < kScaledColumns; c += 2 * kLanes) decode(codes + c, unit, to + c);
}

// Adds the columns [begin, begin + kVectors * 8) of all rows.
template <class Load, int kVectors>
void add_columns(const AddRowsArgs& a, int64_t begin) {
  __m256 sums[kVectors] = {};
  for (int r = 0; r < a.n_rows; ++r) {
    const char* const row = static_cast<const char*>(a.rows[r].row) + begin * Load::kBytes;
    const __m256 weight = _mm256_set1_ps(a.rows[r].weight);
    for (int i = 0; i < kVectors; ++i)
      sums[i] = _mm256_add_ps(sums[i],
                              _mm256_mul_ps(weight, Load::load(row + i * kLanes * Load::kBytes)));
  }
  for (int i = 0; i < kVectors; ++i) {
    float* const out = a.out + begin + i * kLanes;
    _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), sums[i]));
  }
}

template <class Load>
void add_rows_of(const AddRowsArgs& a) {
  constexpr int kVectors = 8;
  int64_t c = 0;
  for (; c + kVectors * kLanes <= a.n; c += kVectors * kLanes) add_columns<Load, kVectors>(a, c);
  for (; c + kLanes <= a.n; c += kLanes) add_columns<Load, 1>(a, c);
  for (; c < a.n; ++c) {
    float sum = 0;
    for (int r = 0; r < a.n_rows; ++r)
      sum += a.rows[r].weight * Load::value(static_cast<const char*>(a.rows[r].row), c);
    a.out[c] += sum;
  }
}

struct F32Rows : LoadF32 {
  static float value(const char* row, int64_t c) { return reinterpret_cast<const float*>(row)[c]; }
};
struct Bf16Rows : LoadBf16 {
  static float value(const char* row, int64_t c) {
    const uint32_t bits = reinterpret_cast<const bf16*>(row)[c];
    return __builtin_bit_cast(float, bits << 16);
  }
};

void add_rows(const AddRowsArgs& a) {
  a.type == ActivationType::kBF16 ? add_rows_of<Bf16Rows>(a) : add_rows_of<F32Rows>(a);
}

}  // namespace

void install_avx2_rows(KernelTable& t) {
  t.encode_fp8 = encode_blocks<largest_of, encode_block>;
  t.decode_fp8 = decode_blocks<decode_block>;
  t.add_rows = add_rows;
}

}  // namespace tandem::cpu
