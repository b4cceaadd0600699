// The reference: scalar kernels simple enough to verify by reading. Tests compare every other
// instruction set with them.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu_kernels/e4m3.h"
#include "cpu_kernels/kernels.h"

namespace tandem::cpu {

void quantize_two_level(const QuantizeArgs&);
namespace {

float bf16_to_float(bf16 v) { return std::bit_cast<float>(uint32_t{v} << 16); }

// 2^exponent, which is a normal number.
float power_of_two(int exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

// IEEE half: 1 sign, 5 exponent (bias 15), 10 mantissa bits.
float f16_to_float(uint16_t v) {
  const int exponent = v >> 10 & 31, mantissa = v & 1023;
  float value = exponent == 0 ? static_cast<float>(mantissa) * power_of_two(-24)
                              : static_cast<float>(1024 + mantissa) * power_of_two(exponent - 25);
  if (exponent == 31)
    value =
        mantissa ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  return v >> 15 ? -value : value;
}

// OCP E4M3 ("fn"): 1 sign, 4 exponent (bias 7), 3 mantissa bits, no infinity, 0x7f is NaN.
float e4m3_to_float(uint8_t v) {
  const int exponent = v >> 3 & 15, mantissa = v & 7;
  float value = exponent == 0 ? static_cast<float>(mantissa) * power_of_two(-9)
                              : static_cast<float>(8 + mantissa) * power_of_two(exponent - 10);
  if ((v & 0x7f) == 0x7f) value = std::numeric_limits<float>::quiet_NaN();
  return v >> 7 ? -value : value;
}

// Tensors in checkpoints may be unaligned.
template <class T>
T load(const void* data, int64_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + i * static_cast<int64_t>(sizeof(T)),
              sizeof(T));
  return value;
}

int8_t int4_at(const void* data, int64_t i) {
  const uint8_t pair = static_cast<const uint8_t*>(data)[i / 8 * 4 + i % 4];
  return static_cast<int8_t>(static_cast<int8_t>(i % 8 < 4 ? pair << 4 : pair) >> 4);
}

// to[0..n) = data[first .. first + n)
void decode(const void* data, WeightType type, int64_t first, int64_t n, float* to) {
  const auto each = [&](auto value_at) {
    for (int64_t c = 0; c < n; ++c) to[c] = value_at(first + c);
  };
  switch (type) {
    case WeightType::kF32:
      return each([=](int64_t i) { return load<float>(data, i); });
    case WeightType::kF16:
      return each([=](int64_t i) { return f16_to_float(load<uint16_t>(data, i)); });
    case WeightType::kBF16:
      return each([=](int64_t i) { return bf16_to_float(load<bf16>(data, i)); });
    case WeightType::kF8E4M3:
      return each([=](int64_t i) { return e4m3_to_float(load<uint8_t>(data, i)); });
    case WeightType::kI8:
      return each([=](int64_t i) { return load<int8_t>(data, i); });
    case WeightType::kI4:
    case WeightType::kI4TwoLevel:
      return each([=](int64_t i) { return int4_at(data, i); });
  }
}

// to[0..n) = w[row][col .. col + n)
void decode_row(const Weight& w, int64_t row, int col, int n, float* to) {
  decode(static_cast<const char*>(w.data) + row * w.stride, w.type, col, n, to);
  if (!w.scales) return;
  const float* scales = w.scales + (w.row0 + row) / w.block_rows * w.scale_stride;
  for (int c = 0; c < n;) {
    const int64_t block = (w.col0 + col + c) / w.block_cols;
    const int64_t end = std::min<int64_t>(n, (block + 1) * w.block_cols - w.col0 - col);
    for (; c < end; ++c) to[c] *= scales[block];
  }
}

// Row-major, as in the checkpoint.
void pack(const PackArgs& a) {
  const int64_t bytes = row_bytes(a.type, a.cols);
  std::memcpy(static_cast<char*>(a.to) + a.first_row * bytes, a.from, a.n_rows * bytes);
}

const float* x_row(const GemmArgs& a, int i) {
  const int64_t row = a.x.rows ? a.x.rows[i] : i;
  return reinterpret_cast<const float*>(static_cast<const char*>(a.x.data) + row * a.x.stride);
}

constexpr int kChunk = 256;

void gemm(const GemmArgs& a) {
  float w[kChunk];
  for (int j = 0; j < a.n; ++j) {
    for (int i = 0; i < a.m; ++i) a.out[i * a.out_stride + j] = 0;
    for (int c0 = 0; c0 < a.k; c0 += kChunk) {
      const int n = std::min(kChunk, a.k - c0);
      decode_row(a.w, a.first_row + j, c0, n, w);
      for (int i = 0; i < a.m; ++i) {
        float sum = a.out[i * a.out_stride + j];
        for (int c = 0; c < n; ++c) sum += x_row(a, i)[c0 + c] * w[c];
        a.out[i * a.out_stride + j] = sum;
      }
    }
  }
}

void gemm_transposed(const GemmArgs& a) {
  float w[kChunk];
  for (int i = 0; i < a.m; ++i) std::fill_n(a.out + i * a.out_stride, a.k, 0.f);
  for (int j = 0; j < a.n; ++j) {
    for (int c0 = 0; c0 < a.k; c0 += kChunk) {
      const int n = std::min(kChunk, a.k - c0);
      decode_row(a.w, a.first_row + j, c0, n, w);
      for (int i = 0; i < a.m; ++i)
        for (int c = 0; c < n; ++c) a.out[i * a.out_stride + c0 + c] += x_row(a, i)[j] * w[c];
    }
  }
}

float dot(const float* a, const float* b, int n) {
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

float activation(const void* row, ActivationType type, int64_t i) {
  return type == ActivationType::kBF16 ? bf16_to_float(load<bf16>(row, i)) : load<float>(row, i);
}

// Column c of row i of keys or values.
float number(const AttendArgs& a, const void* rows, int64_t stride, int i, int c) {
  return activation(static_cast<const char*>(rows) + i * stride, a.type, c);
}

void attend_block(const AttendArgs& a, const KeyBlock& block, int i) {
  const int n = std::min(block.n_keys, block.visible + (a.first_query + i) / a.queries_per_token);
  if (n <= 0) return;
  const float *q = a.q + i * a.q_stride, *q_rope = a.q_rope + i * a.q_rope_stride;
  float score[kMaxKeys], max = a.max[i];
  for (int j = 0; j < n; ++j) {
    float sum = 0;
    for (int c = 0; c < a.dim; ++c) sum += q[c] * number(a, block.k, a.k_stride, j, c);
    for (int c = 0; c < a.rope_dim; ++c)
      sum += q_rope[c] * number(a, block.k_rope, a.k_rope_stride, j, c);
    score[j] = a.scale * sum;
    max = std::max(max, score[j]);
  }
  float* out = a.out + i * a.out_stride;
  const float rescale = std::exp(a.max[i] - max);
  for (int c = 0; c < a.v_dim; ++c) out[c] *= rescale;
  float sum = a.sum[i] * rescale;
  for (int j = 0; j < n; ++j) {
    const float p = std::exp(score[j] - max);
    sum += p;
    for (int c = 0; c < a.v_dim; ++c) out[c] += p * number(a, block.v, a.v_stride, j, c);
  }
  a.max[i] = max;
  a.sum[i] = sum;
}

void attend(const AttendArgs& a) {
  for (int b = 0; b < a.n_blocks; ++b)
    for (int i = 0; i < a.n_queries; ++i) attend_block(a, a.blocks[b], i);
}

void rms_norm(const RmsNormArgs& a) {
  const float scale = 1 / std::sqrt(dot(a.x, a.x, a.n) / static_cast<float>(a.n) + a.eps);
  for (int i = 0; i < a.n; ++i) a.out[i] = a.x[i] * scale * a.gain[i];
}

void silu_mul(const SiluMulArgs& a) {
  for (int64_t i = 0; i < a.n; ++i) a.out[i] = a.gate[i] / (1 + std::exp(-a.gate[i])) * a.up[i];
}

void decode(const DecodeArgs& a) { decode(a.from, a.type, 0, a.n, a.to); }

void encode_bf16(const EncodeBf16Args& a) {
  for (int64_t i = 0; i < a.n; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(a.from[i]);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    a.to[i] = static_cast<bf16>((nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

// Sizes of floats compare as their bits do, and those of NaN are the largest.
int32_t size_bits(float x) { return std::bit_cast<int32_t>(x) & 0x7fffffff; }

void encode_fp8(const EncodeFp8Args& a) {
  for (int64_t begin = 0; begin < a.n; begin += kScaledColumns) {
    const int64_t end = std::min(begin + kScaledColumns, a.n);
    int32_t size = 0;
    for (int64_t c = begin; c < end; ++c) size = std::max(size, size_bits(a.from[c]));
    const auto largest = std::bit_cast<float>(size);
    const float inverse = largest > 0 ? 448 / largest : 0;
    for (int64_t c = begin; c < end; ++c) a.codes[c] = to_e4m3(a.from[c] * inverse);
    a.scales[begin / kScaledColumns] = largest / 448;
  }
}

void decode_fp8(const DecodeFp8Args& a) {
  for (int64_t i = 0; i < a.n; ++i)
    a.to[i] = e4m3_to_float(a.codes[i]) * a.scales[i / kScaledColumns];
}

void add_rows(const AddRowsArgs& a) {
  for (int64_t i = 0; i < a.n; ++i) {
    float sum = 0;
    for (const WeightedRow* r = a.rows; r != a.rows + a.n_rows; ++r)
      sum += r->weight * activation(r->row, a.type, i);
    a.out[i] += sum;
  }
}

float max_magnitude(const float* x, int64_t n) {
  float max = 0;
  for (int64_t i = 0; i < n; ++i) max = std::max(max, std::fabs(x[i]));
  return max;
}

void encode(const EncodeArgs& a) {
  const int64_t padded = encoded_columns(a.k);
  if (a.type == ActivationType::kBF16) {
    bf16* const to = static_cast<bf16*>(a.to);
    encode_bf16({a.from, to, a.k});
    std::fill(to + a.k, to + padded, bf16{0});
    return;
  }
  uint8_t* const to = static_cast<uint8_t*>(a.to);
  *a.scale = max_magnitude(a.from, a.k) / 127;
  const float inverse = *a.scale > 0 ? 1 / *a.scale : 0;
  for (int c = 0; c < a.k; ++c) to[c] = static_cast<uint8_t>(128 + std::lrint(a.from[c] * inverse));
  std::fill(to + a.k, to + padded, uint8_t{128});
}

void quantize_e4m3(const float* from, int n, uint8_t* codes, float* scale) {
  *scale = max_magnitude(from, n) / 448;
  const float inverse = *scale > 0 ? 1 / *scale : 0;
  for (int i = 0; i < n; ++i) codes[i] = to_e4m3(from[i] * inverse);
}

// Returns the sum of the dequantized values.
float quantize_i8(const float* from, int n, int8_t* codes, float* scale) {
  *scale = max_magnitude(from, n) / 127;
  const float inverse = *scale > 0 ? 1 / *scale : 0;
  int64_t sum = 0;
  for (int i = 0; i < n; ++i) sum += codes[i] = static_cast<int8_t>(std::lrint(from[i] * inverse));
  return static_cast<float>(sum) * *scale;
}

float round_to_bf16(float v) {
  bf16 rounded;
  encode_bf16({&v, &rounded, 1});
  return bf16_to_float(rounded);
}

// The value with the largest magnitude maps to code -8; then the scale with the least squared error
// for these codes is stored.
float quantize_i4(const float* from, int n, uint8_t* codes, float* scale) {
  const float max = max_magnitude(from, n);
  const float sign = std::find(from, from + n, max) != from + n ? -1.f : 1.f;
  const float inverse = max > 0 ? sign * 8 / max : 0;
  double product = 0, square = 0;
  int64_t sum = 0;
  for (int i = 0; i < n; ++i) {
    const long code = std::clamp(std::lrint(from[i] * inverse), -8L, 7L);
    uint8_t& pair = codes[i / 8 * 4 + i % 4];
    pair = static_cast<uint8_t>(i % 8 < 4 ? code & 15 : pair | (code & 15) << 4);
    product += double{from[i]} * static_cast<double>(code);
    square += static_cast<double>(code * code);
    sum += code;
  }
  *scale = square > 0 ? round_to_bf16(static_cast<float>(product / square)) : 0;
  return static_cast<float>(sum) * *scale;
}

void quantize(const QuantizeArgs& a) {
  if (a.type == WeightType::kI4TwoLevel) return quantize_two_level(a);
  *a.sum = 0;
  for (int64_t c = 0; c < a.k; c += a.group) {
    char* const codes = static_cast<char*>(a.codes) + row_bytes(a.type, c);
    float* const scale = a.scales + c / a.group;
    if (a.type == WeightType::kF8E4M3)
      quantize_e4m3(a.from + c, a.group, reinterpret_cast<uint8_t*>(codes), scale);
    if (a.type == WeightType::kI8)
      *a.sum += quantize_i8(a.from + c, a.group, reinterpret_cast<int8_t*>(codes), scale);
    if (a.type == WeightType::kI4)
      *a.sum += quantize_i4(a.from + c, a.group, reinterpret_cast<uint8_t*>(codes), scale);
  }
}

}  // namespace

void install_reference(KernelTable& t) {
  t = {.isa = Isa::kReference,
       .name = "reference",
       .layout = Layout::kRows,
       .activation = {},
       .attention = ActivationType::kF32,
       .pack = pack,
       .quantize = quantize,
       .encode = encode,
       .tile = nullptr,
       .takes_tiles = nullptr,
       .gemm = gemm,
       .gemm_transposed = gemm_transposed,
       .attend = attend,
       .rms_norm = rms_norm,
       .silu_mul = silu_mul,
       .decode = decode,
       .encode_bf16 = encode_bf16,
       .encode_fp8 = encode_fp8,
       .decode_fp8 = decode_fp8,
       .add_rows = add_rows};
}

}  // namespace tandem::cpu
