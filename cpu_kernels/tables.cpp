#include "cpu_kernels/tables.h"

namespace tandem::cpu {

void install_reference(KernelTable&);
void install_avx2_products(KernelTable&);
void install_avx2_attention(KernelTable&);
void install_avx2_elementwise(KernelTable&);
void install_avx2_rows(KernelTable&);
void install_avx2_int8(KernelTable&);
void install_avx2_vnni(KernelTable&);
void install_avx512_products(KernelTable&);
void install_avx512_rows(KernelTable&);
void install_avx512_int8(KernelTable&);
void install_avx512_bf16(KernelTable&);
void install_avx512_attention(KernelTable&);
void install_amx(KernelTable&);
void install_amx_attention(KernelTable&);

// Each instruction set keeps the previous set's kernels and replaces those it improves.
KernelTable table_of(Isa isa, const Extensions& has) {
  KernelTable table;
  install_reference(table);
  if (isa >= Isa::kAvx2) {
    install_avx2_products(table);
    install_avx2_attention(table);
    install_avx2_elementwise(table);
    install_avx2_rows(table);
    install_avx2_int8(table);
    if (has.avx_vnni) install_avx2_vnni(table);
  }
  if (isa >= Isa::kAvx512) {
    install_avx512_products(table);
    install_avx512_rows(table);
    install_avx512_int8(table);
    if (has.avx512_bf16) {
      install_avx512_bf16(table);
      install_avx512_attention(table);
    }
  }
  if (isa >= Isa::kAmx) {
    install_amx(table);
    install_amx_attention(table);
  }
  table.isa = isa;
  table.name = name_of(isa);
  return table;
}

}  // namespace tandem::cpu
