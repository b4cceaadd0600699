// Chooses kernels for this machine. The only place that asks what the CPU can do.
#include "cpu_kernels/kernels.h"

namespace tandem::cpu {

void install_reference(KernelTable&);
void install_avx2_products(KernelTable&);
void install_avx2_attention(KernelTable&);

Isa best_isa() {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  return avx2 ? Isa::kAvx2 : Isa::kReference;
}

const char* name_of(Isa isa) {
  constexpr const char* kNames[kNumIsas] = {"reference", "avx2"};
  return kNames[static_cast<int>(isa)];
}

// Each instruction set keeps the kernels of the one before and replaces what it does better.
KernelTable kernels_for(Isa isa) {
  KernelTable table;
  install_reference(table);
  if (isa >= Isa::kAvx2) {
    table.isa = Isa::kAvx2;
    table.name = name_of(Isa::kAvx2);
    install_avx2_products(table);
    install_avx2_attention(table);
  }
  return table;
}

}  // namespace tandem::cpu
