// Chooses kernels for this machine. The only place that asks what the CPU can do.
#include <cpuid.h>

#include "cpu_kernels/tables.h"

namespace tandem::cpu {
namespace {

// Every CPU with both has F16C too, which clang 14 cannot ask for.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

// What Ice Lake, Zen 4 and their successors have in common.
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
}

// GCC 12 has no name for it: leaf 7, subleaf 1, bit 4 of eax.
bool has_avx_vnni() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}

}  // namespace

Isa best_isa() {
  if (!has_avx2()) return Isa::kReference;
  return has_avx512() ? Isa::kAvx512 : Isa::kAvx2;
}

const char* name_of(Isa isa) {
  constexpr const char* kNames[kNumIsas] = {"reference", "avx2", "avx512"};
  return kNames[static_cast<int>(isa)];
}

Extensions extensions_here() {
  return {.avx_vnni = has_avx_vnni(), .avx512_bf16 = __builtin_cpu_supports("avx512bf16") != 0};
}

KernelTable kernels_for(Isa isa) { return table_of(isa, extensions_here()); }

}  // namespace tandem::cpu
