// For builds with ThreadSanitizer. Instrumented vector kernels are a hundred times slower, so they
// are compiled without it, and each call reports here the shared memory that it reads and writes.
// Weights are written once, so one byte per panel is reported.
#include "cpu_kernels/tables.h"

#ifdef __SANITIZE_THREAD__

extern "C" {  // of the ThreadSanitizer runtime
void __tsan_read_range(const void* from, unsigned long n_bytes);
void __tsan_write_range(void* to, unsigned long n_bytes);
}

namespace tandem::cpu {
namespace {

constexpr int bytes_of(ActivationType type) {
  return type == ActivationType::kF32 ? 4 : type == ActivationType::kBF16 ? 2 : 1;
}

constexpr int64_t scales_bytes(int64_t n) { return (n + kScaledColumns - 1) / kScaledColumns * 4; }

void reads(const void* from, int64_t n_bytes) { __tsan_read_range(from, n_bytes); }
void writes(void* to, int64_t n_bytes) { __tsan_write_range(to, n_bytes); }

void reads_rows(const void* from, int64_t n, int64_t stride, int64_t n_bytes) {
  for (int64_t i = 0; i < n; ++i) reads(static_cast<const char*>(from) + i * stride, n_bytes);
}
void writes_rows(float* to, int64_t n, int64_t stride, int64_t columns) {
  for (int64_t i = 0; i < n; ++i) writes(to + i * stride, columns * 4);
}

void sees_product(const GemmArgs& a, Layout layout, int x_columns, int out_columns) {
  for (int i = 0; i < a.m; ++i) {
    const int64_t row = a.x.rows ? a.x.rows[i] : i;
    reads(static_cast<const char*>(a.x.data) + row * a.x.stride,
          int64_t{x_columns} * bytes_of(a.x.type));
    if (a.x.scales) reads(a.x.scales + row, 4);
  }
  const int rows = layout == Layout::kPanels ? kPanelRows : 1;
  const int64_t first = a.first_row / rows, last = (a.first_row + a.n - 1) / rows;
  reads_rows(static_cast<const char*>(a.w.data) + first * a.w.stride, last - first + 1, a.w.stride,
             1);
  writes_rows(a.out, a.m, a.out_stride, out_columns);
}

// Wrappers of one table. The table is static because kernel functions take nothing but their
// arguments.
template <Isa kIsa>
struct Seen {
  static const KernelTable& table() {
    static const KernelTable table = table_of(kIsa, extensions_here());
    return table;
  }
  static void pack(const PackArgs& a) {
    reads(a.from, row_bytes(a.type, a.n_rows * a.cols));
    if (table().layout == Layout::kPanels) {
      const int64_t panel = panel_bytes(a.type, a.cols);
      writes(static_cast<char*>(a.to) + a.first_row / kPanelRows * panel,
             (a.n_rows + kPanelRows - 1) / kPanelRows * panel);
    } else {
      const int64_t row = row_bytes(a.type, a.cols);
      writes(static_cast<char*>(a.to) + a.first_row * row, a.n_rows * row);
    }
    table().pack(a);
  }
  static void quantize(const QuantizeArgs& a) {
    reads(a.from, a.k * 4);
    writes(a.codes, row_bytes(a.type, a.k));
    writes(a.scales, a.k / a.group * 4);
    table().quantize(a);
  }
  static void encode(const EncodeArgs& a) {
    reads(a.from, int64_t{a.k} * 4);
    writes(a.to, encoded_columns(a.k) * bytes_of(a.type));
    if (a.scale) writes(a.scale, 4);
    table().encode(a);
  }
  static void gemm(const GemmArgs& a) {
    sees_product(a, table().layout, a.k, a.n);
    table().gemm(a);
  }
  static void gemm_transposed(const GemmArgs& a) {
    sees_product(a, table().layout, a.n, a.k);
    table().gemm_transposed(a);
  }
  static void attend(const AttendArgs& a) {
    const int size = bytes_of(a.type);
    reads_rows(a.q, a.n_queries, a.q_stride * 4, int64_t{a.dim} * 4);
    reads_rows(a.q_rope, a.n_queries, a.q_rope_stride * 4, int64_t{a.rope_dim} * 4);
    for (int b = 0; b < a.n_blocks; ++b) {
      const KeyBlock& block = a.blocks[b];
      reads_rows(block.k, block.n_keys, a.k_stride, int64_t{a.dim} * size);
      reads_rows(block.k_rope, block.n_keys, a.k_rope_stride, int64_t{a.rope_dim} * size);
      reads_rows(block.v, block.n_keys, a.v_stride, int64_t{a.v_dim} * size);
    }
    writes_rows(a.out, a.n_queries, a.out_stride, a.v_dim);
    writes(a.max, int64_t{a.n_queries} * 4);
    writes(a.sum, int64_t{a.n_queries} * 4);
    table().attend(a);
  }
  static void rms_norm(const RmsNormArgs& a) {
    reads(a.x, int64_t{a.n} * 4);
    writes(a.out, int64_t{a.n} * 4);
    table().rms_norm(a);
  }
  static void silu_mul(const SiluMulArgs& a) {
    reads(a.gate, a.n * 4);
    reads(a.up, a.n * 4);
    writes(a.out, a.n * 4);
    table().silu_mul(a);
  }
  static void decode(const DecodeArgs& a) {
    reads(a.from, row_bytes(a.type, a.n));
    writes(a.to, a.n * 4);
    table().decode(a);
  }
  static void encode_bf16(const EncodeBf16Args& a) {
    reads(a.from, a.n * 4);
    writes(a.to, a.n * 2);
    table().encode_bf16(a);
  }
  static void encode_fp8(const EncodeFp8Args& a) {
    reads(a.from, a.n * 4);
    writes(a.codes, a.n);
    writes(a.scales, scales_bytes(a.n));
    table().encode_fp8(a);
  }
  static void decode_fp8(const DecodeFp8Args& a) {
    reads(a.codes, a.n);
    reads(a.scales, scales_bytes(a.n));
    writes(a.to, a.n * 4);
    table().decode_fp8(a);
  }
  static void add_rows(const AddRowsArgs& a) {
    for (int i = 0; i < a.n_rows; ++i) reads(a.rows[i].row, a.n * bytes_of(a.type));
    writes(a.out, a.n * 4);
    table().add_rows(a);
  }
  static KernelTable seen() {
    KernelTable t = table();
    t.pack = pack;
    t.quantize = quantize;
    t.encode = encode;
    t.gemm = gemm;
    t.gemm_transposed = gemm_transposed;
    t.attend = attend;
    t.rms_norm = rms_norm;
    t.silu_mul = silu_mul;
    t.decode = decode;
    t.encode_bf16 = encode_bf16;
    t.encode_fp8 = encode_fp8;
    t.decode_fp8 = decode_fp8;
    t.add_rows = add_rows;
    return t;
  }
};

}  // namespace

KernelTable kernels_for(Isa isa) {
  switch (isa) {
    case Isa::kReference:
      return Seen<Isa::kReference>::seen();
    case Isa::kAvx2:
      return Seen<Isa::kAvx2>::seen();
    case Isa::kAvx512:
      return Seen<Isa::kAvx512>::seen();
    case Isa::kAmx:
      return Seen<Isa::kAmx>::seen();
  }
  __builtin_unreachable();
}

}  // namespace tandem::cpu

#endif
