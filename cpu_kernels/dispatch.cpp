// Chooses kernels for this machine. The only place that asks what the CPU can do.
#include <cpuid.h>

#include "cpu_kernels/kernels.h"

namespace tandem::cpu {

void install_reference(KernelTable&);
void install_avx2_products(KernelTable&);
void install_avx2_attention(KernelTable&);
void install_avx2_int8(KernelTable&);
void install_avx2_vnni(KernelTable&);
void install_avx512_products(KernelTable&);
void install_avx512_int8(KernelTable&);
void install_avx512_bf16(KernelTable&);
void install_avx512_attention(KernelTable&);

namespace {

// Leaf 7, subleaf 1, EAX bit 4; GCC 12 has no name for it.
bool has_avx_vnni() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}

}  // namespace

// avx512 is what Ice Lake, Zen 4 and their successors have in common.
Isa best_isa() {
  // Every CPU with both has F16C too, which clang 14 cannot ask for.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Isa::kReference;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
  return avx512 ? Isa::kAvx512 : Isa::kAvx2;
}

const char* name_of(Isa isa) {
  constexpr const char* kNames[kNumIsas] = {"reference", "avx2", "avx512"};
  return kNames[static_cast<int>(isa)];
}

// Each instruction set keeps the kernels of the one before and replaces what it does better.
KernelTable kernels_for(Isa isa) {
  KernelTable table;
  install_reference(table);
  if (isa >= Isa::kAvx2) {
    install_avx2_products(table);
    install_avx2_attention(table);
    install_avx2_int8(table);
    if (has_avx_vnni()) install_avx2_vnni(table);
  }
  if (isa >= Isa::kAvx512) {
    install_avx512_products(table);
    install_avx512_int8(table);
    if (__builtin_cpu_supports("avx512bf16")) {
      install_avx512_bf16(table);
      install_avx512_attention(table);
    }
  }
  table.isa = isa;
  table.name = name_of(isa);
  return table;
}

}  // namespace tandem::cpu
