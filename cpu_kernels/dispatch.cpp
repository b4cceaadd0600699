// Chooses kernels for this machine. Only this file queries CPU features.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpu_kernels/peaks.h"
#include "cpu_kernels/tables.h"

namespace tandem::cpu {
namespace {

// The features common to Ice Lake, Zen 4 and their successors.
bool has_avx512() {
  return cpu_has(Feature::kAvx512Vnni) && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vbmi");
}

// Linux denies tile data to a process until it requests permission
// (Documentation/arch/x86/xstate.rst); repeated requests have no effect.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

struct Leaf7 {
  unsigned eax = 0, edx = 0;
};
// Reads cpuid leaf 7: GCC 12 has no names for these features.
Leaf7 leaf7(unsigned subleaf) {
  Leaf7 leaf;
  unsigned ebx, ecx;
  __get_cpuid_count(7, subleaf, &leaf.eax, &ebx, &ecx, &leaf.edx);
  return leaf;
}

}  // namespace

bool cpu_has(Feature feature) {
  switch (feature) {
    case Feature::kBaseline:
      return true;
    case Feature::kAvx2:  // every CPU with both has F16C too, which clang 14 cannot query
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Feature::kAvxVnni:
      return cpu_has(Feature::kAvx2) && (leaf7(1).eax >> 4 & 1);
    case Feature::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
    case Feature::kAvx512Vnni:
      return cpu_has(Feature::kAvx512) && __builtin_cpu_supports("avx512vnni");
    case Feature::kAvx512Bf16:
      return cpu_has(Feature::kAvx512) && __builtin_cpu_supports("avx512bf16");
    case Feature::kAmxBf16:
      return (leaf7(0).edx >> 22 & 1) && may_use_tiles();
    case Feature::kAmxInt8:
      return (leaf7(0).edx >> 25 & 1) && may_use_tiles();
  }
  return false;
}

Isa best_isa() {
  if (!cpu_has(Feature::kAvx2)) return Isa::kReference;
  if (!has_avx512()) return Isa::kAvx2;
  const bool amx = cpu_has(Feature::kAvx512Bf16) && __builtin_cpu_supports("gfni") &&
                   cpu_has(Feature::kAmxBf16) && cpu_has(Feature::kAmxInt8);
  return amx ? Isa::kAmx : Isa::kAvx512;
}

const char* name_of(Isa isa) {
  constexpr const char* kNames[kNumIsas] = {"reference", "avx2", "avx512", "amx"};
  return kNames[static_cast<int>(isa)];
}

Extensions extensions_here() {
  return {.avx_vnni = cpu_has(Feature::kAvxVnni), .avx512_bf16 = cpu_has(Feature::kAvx512Bf16)};
}

#ifndef __SANITIZE_THREAD__  // then thread_sanitizer.cpp
KernelTable kernels_for(Isa isa) { return table_of(isa, extensions_here()); }
#endif

}  // namespace tandem::cpu
