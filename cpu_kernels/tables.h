// Combines the islands into the table of an instruction set. Compiled a second time, under another
// name, with the emulated islands (tests/emulate).
#pragma once
#include "cpu_kernels/kernels.h"

namespace tandem::cpu {

// Features that some CPUs of one instruction set have and others lack.
struct Extensions {
  bool avx_vnni = false;     // Alder Lake, Zen 5 and later
  bool avx512_bf16 = false;  // Zen 4, Sapphire Rapids and later, not Ice Lake; amx implies it
};

Extensions extensions_here();  // features of this machine

KernelTable table_of(Isa isa, const Extensions& has);

}  // namespace tandem::cpu
