// The contract between the engine and its CPU kernels: plain structs in, no allocation, no
// exceptions, no globals, one thread per call. A kernel file may include only this header and
// <immintrin.h>.
#pragma once
#include <cstdint>

namespace tandem::cpu {

using bf16 = uint16_t;  // bit pattern of a bfloat16

// Instruction sets, each a superset of those before it.
enum class Isa : uint8_t { kReference, kAvx2, kAvx512, kAmx };
constexpr int kNumIsas = 4;

enum class WeightType : uint8_t {
  kF32,
  kF16,
  kBF16,
  kF8E4M3,
  kI8,
  kI4,  // two's complement; per 8 columns in 4 bytes, byte b holds column b low and 4 + b high
  kI4TwoLevel,  // the same codes; a group's scale is an integer times the row's scale
};
constexpr int kNumWeightTypes = 7;
constexpr bool is_i4(WeightType type) {
  return type == WeightType::kI4 || type == WeightType::kI4TwoLevel;
}

// Storage of weight matrices in a kernel table.
enum class Layout : uint8_t {
  kRows,  // as in the checkpoint
  // Panels of 16 rows, the last padded with zeros. A panel is a list of 64-byte steps. A step has 4
  // bytes of every row, which hold as many neighbouring columns as fit; the number of steps is
  // padded with zeros to a multiple of 16. Sixteen steps are one B tile of AMX, and one step feeds
  // a VNNI dot product. FP8 swaps the middle words of every 16 bytes, [row][column pair] for
  // [column pair][row], so that widening yields BF16 steps.
  kPanels,
};
constexpr int kPanelRows = 16, kStepBytes = 64, kStepsMultiple = 16;

// Columns per step of a panel.
constexpr int columns_of_step(WeightType type) {
  constexpr int kColumns[kNumWeightTypes] = {1, 2, 2, 4, 4, 8, 8};
  return kColumns[static_cast<int>(type)];
}
constexpr int64_t panel_bytes(WeightType type, int64_t cols) {
  const int64_t columns = columns_of_step(type) * int64_t{kStepsMultiple};
  return (cols + columns - 1) / columns * kStepsMultiple * kStepBytes;
}

// Bytes of a row of [.., cols] as pack() reads it. For INT4, cols is a multiple of 8.
constexpr int64_t row_bytes(WeightType type, int64_t cols) {
  return cols * 4 / columns_of_step(type);
}

constexpr int kScalePanels = 4;     // panels whose INT4 scales are interleaved
constexpr int kMaxMultiplier = 15;  // limit of kI4TwoLevel: 8 * 15 fits a byte

// A weight matrix in the layout made by a table's pack(). value[r][c] = code[r][c] * scale, where
// scale = scales[(row0 + r) / block_rows * scale_stride + (col0 + c) / block_cols]; no scales: 1.
// Panels of bytes and INT4 have scales per row (block_rows 1, row0 and col0 0), followed by 128
// times the sum of each row's values, which products with kU8 activations subtract. kI8 scales are
// floats [panel][column block][16]; scale_stride is that of a panel. INT4 interleaves the scales of
// four panels, so that whole groups of panels read one stream; the row sums are [panel / 4][4][16]
// floats, and scale_stride, in floats, is that of four panels. kI4 scales are [panel / 4][column
// block][4][16] BF16. kI4TwoLevel has [panel / 4][column block][4][16] one-byte multipliers from
// -15 to 15, then [panel / 4][4][16] floats, the rows' own scales; its block_cols divides 512.
struct Weight {
  const void* data;
  int64_t stride;  // bytes between rows or panels
  WeightType type;
  const float* scales;
  int64_t scale_stride, n_scale_rows;
  int block_rows, block_cols, row0, col0;
};

// Copies rows of a row-major checkpoint matrix into the table's layout, without changing their
// type.
struct PackArgs {
  const void* from;  // rows first_row .. first_row + n_rows of [rows, cols], dense, at any address
  void* to;          // [rows, cols] packed; only these rows are written
  WeightType type;
  // Panels: first_row is a multiple of 16, and so is n_rows unless these are the last rows.
  int64_t first_row, n_rows, cols;
};

// Activations of a product: float rows, or rows made by encode().
enum class ActivationType : uint8_t {
  kF32,
  kBF16,
  kU8,  // 128 + round(x / scale), scale = max |x| / 127 of the row; only with kI8 and INT4
};
constexpr int kActivationMultiple = 128;

// Columns of a row of n after encoding.
constexpr int64_t encoded_columns(int64_t n) {
  return (n + kActivationMultiple - 1) / kActivationMultiple * kActivationMultiple;
}

struct Activations {
  const void* data;
  int64_t stride;  // bytes between rows
  ActivationType type;
  const int32_t* rows = nullptr;  // [m] rows to use; null: 0, 1, .. m - 1
  const float* scales = nullptr;  // kU8: scale of every row
  bool tiled = false;             // tiles made by tile(); `rows` then select scales only
};

// Copies n rows, at most kTileRows, to tiles: [64 bytes of columns][n][64 bytes]. The rows of a
// product are tiled kTileRows at a time, the tiles of every 16 rows behind those of the rows
// before, so that tiled rows take as many bytes as others of the same stride. Products may read a
// tile's bytes, kTileBytes, behind them.
constexpr int kTileRows = 16, kTileBytes = 1024;
struct TileArgs {
  Activations x;    // encoded rows, not tiled; the stride is a multiple of 64 bytes
  int first, n, k;  // rows [first, first + n), their columns
  void* to;
};

// Encodes one row.
struct EncodeArgs {
  const float* from;  // [k]
  int k;
  ActivationType type;     // not kF32
  void* to;                // [encoded_columns(k)], 64-byte aligned
  float* scale = nullptr;  // kU8
};

// Quantizes one row of weights to kF8E4M3, kI8 or INT4 with a scale per `group` columns, which
// divides k. kI4 scales are BF16 values, kI4TwoLevel scales are multiples of row_scale.
struct QuantizeArgs {
  const float* from;  // [k]
  int64_t k;
  WeightType type;
  int group;
  void* codes;                 // a row as pack() reads it
  float* scales;               // [k / group]
  float* sum;                  // sum of the dequantized values; not for kF8E4M3
  float* row_scale = nullptr;  // kI4TwoLevel
};

// gemm: out[i][j] = sum_c x[row(i)][c] * w[first_row + j][c], i < m, j < n, c < k. The order of
// each sum depends on k alone, so results do not change with the batch or with the split among
// threads. x is float or the table's activation[w.type]; INT8 and INT4 weights take only the
// latter. gemm_transposed: out[i][c] = sum_j x[row(i)][j] * w[first_row + j][c]; x is float.
struct GemmArgs {
  Activations x;       // [.., k]; transposed: [.., n]
  Weight w;            // [.., k]
  int64_t first_row;   // first row of w
  float* out;          // [m, n]; transposed: [m, k]
  int64_t out_stride;  // elements between rows
  int m, n, k;
  // The product that follows, of the same type and k; its first weights are prefetched.
  const Weight* next = nullptr;
  int64_t next_row = 0;
};

// Keys and values of up to kMaxKeys tokens.
struct KeyBlock {
  const void *k, *k_rope;  // [n_keys, dim], [n_keys, rope_dim]
  const void* v;           // [n_keys, v_dim]
  int n_keys;
  int visible;  // query i sees the first min(n_keys, visible + (first_query + i) /
                // queries_per_token)
};
constexpr int kMaxKeys = 64;

// Attention of some queries over blocks of keys, with the running softmax of FlashAttention (Dao et
// al. 2022, algorithm 1). Scores have two parts, q.k + q_rope.k_rope (multi-head latent attention,
// DeepSeek-V2 paper, section 2.1). The order of a query's sums depends on the blocks alone.
struct AttendArgs {
  ActivationType type;      // type of keys and values: kF32 or kBF16
  const float *q, *q_rope;  // [n_queries, dim], [n_queries, rope_dim]
  int64_t q_stride, q_rope_stride;
  const KeyBlock* blocks;
  int n_blocks;
  int64_t k_stride, k_rope_stride, v_stride;  // bytes between rows
  int n_queries, dim, rope_dim, v_dim;
  int first_query, queries_per_token;
  float scale;
  float* out;  // [n_queries, v_dim] running sum of exp(score - max) * v
  int64_t out_stride;
  float *max,
      *sum;  // [n_queries] of the scores seen so far; before the first block -infinity and 0
};
constexpr int kMaxKeyDim = 576, kMaxValueDim = 512;  // limits of dim + rope_dim, and of v_dim

// out = x / sqrt(mean(x^2) + eps) * gain
struct RmsNormArgs {
  const float *x, *gain;
  float* out;
  int n;
  float eps;
};

struct SiluMulArgs {
  const float *gate, *up;
  float* out;  // silu(gate) * up, may be `gate`
  int64_t n;
};

// Widens n stored elements to float.
struct DecodeArgs {
  const void* from;
  WeightType type;
  float* to;
  int64_t n;
};

// Rounds to nearest even.
struct EncodeBf16Args {
  const float* from;
  bf16* to;
  int64_t n;
};

// Rows as they travel between ranks: E4M3 codes, and a scale for every kScaledColumns columns,
// which is their largest magnitude / 448. A block with NaN has the scale NaN, because decoding
// knows no code of NaN. All tables give the same bits.
constexpr int kScaledColumns = 128;
struct EncodeFp8Args {
  const float* from;  // [n]
  uint8_t* codes;     // [n]
  float* scales;      // [n / kScaledColumns, rounded up]
  int64_t n;
};
struct DecodeFp8Args {
  const uint8_t* codes;  // as EncodeFp8Args has them
  const float* scales;
  float* to;  // [n]
  int64_t n;
};

// out[i] += sum of weight * row[i] over the rows in their order. Every product and every sum is
// rounded, and the sum begins with 0: all tables give the same bits.
struct WeightedRow {
  const void* row;  // [n] at a multiple of its type's bytes
  float weight;
};
struct AddRowsArgs {
  const WeightedRow* rows;
  int n_rows;
  ActivationType type;  // of the rows: kF32 or kBF16
  float* out;           // [n]
  int64_t n;
};

struct KernelTable {
  Isa isa;
  const char* name;
  Layout layout;
  ActivationType activation[kNumWeightTypes];  // the fastest for each weight type
  ActivationType attention;  // keys and values that attend() reads fastest, kF32 or kBF16
  void (*pack)(const PackArgs&);
  void (*quantize)(const QuantizeArgs&);
  void (*encode)(const EncodeArgs&);
  void (*tile)(const TileArgs&);         // null: products do not take tiled rows
  bool (*takes_tiles)(const Weight& w);  // whether products with w do
  void (*gemm)(const GemmArgs&);
  void (*gemm_transposed)(const GemmArgs&);
  void (*attend)(const AttendArgs&);
  void (*rms_norm)(const RmsNormArgs&);
  void (*silu_mul)(const SiluMulArgs&);
  void (*decode)(const DecodeArgs&);
  void (*encode_bf16)(const EncodeBf16Args&);
  void (*encode_fp8)(const EncodeFp8Args&);
  void (*decode_fp8)(const DecodeFp8Args&);
  void (*add_rows)(const AddRowsArgs&);
};

// The best instruction set of this machine, and its kernels. Callers must not request a set above
// best_isa().
Isa best_isa();
const char* name_of(Isa isa);
KernelTable kernels_for(Isa isa);

}  // namespace tandem::cpu
