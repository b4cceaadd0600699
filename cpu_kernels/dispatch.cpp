// Chooses kernels for this machine. The only place that asks what the CPU can do.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

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

// The kernel keeps tiles from a process until it asks for them (Documentation/arch/x86/xstate.rst);
// asking again changes nothing.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// GCC 12 has no names for what follows. Leaf 7 of cpuid: bf16, tiles and int8 are bits 22, 24 and
// 25 of edx.
bool has_amx() {
  constexpr unsigned kBits = 1u << 22 | 1u << 24 | 1u << 25;
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kBits) == kBits &&
         may_use_tiles();
}

// Leaf 7, subleaf 1, bit 4 of eax.
bool has_avx_vnni() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
}

}  // namespace

Isa best_isa() {
  if (!has_avx2()) return Isa::kReference;
  if (!has_avx512()) return Isa::kAvx2;
  return extensions_here().avx512_bf16 && has_amx() ? Isa::kAmx : Isa::kAvx512;
}

const char* name_of(Isa isa) {
  constexpr const char* kNames[kNumIsas] = {"reference", "avx2", "avx512", "amx"};
  return kNames[static_cast<int>(isa)];
}

Extensions extensions_here() {
  return {.avx_vnni = has_avx_vnni(), .avx512_bf16 = __builtin_cpu_supports("avx512bf16") != 0};
}

KernelTable kernels_for(Isa isa) { return table_of(isa, extensions_here()); }

}  // namespace tandem::cpu
