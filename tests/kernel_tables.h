// The kernel tables under test: native where this machine runs them, emulated everywhere, and
// native with emulated tiles where only AMX is missing (tests/emulate). The name of a table says
// which it is.
#pragma once
#include <string>
#include <vector>

#include "cpu_kernels/tables.h"
#include "tests/emulate/trap_tiles.h"

namespace tandem::cpu {

KernelTable emulated_table_of(Isa isa, const Extensions& has);

}  // namespace tandem::cpu

namespace tandem::test {

struct NamedTable {
  std::string name;
  cpu::KernelTable kernels;
  cpu::Extensions has;
};

// The variants of kernel tables, independent of this machine.
struct Flavour {
  const char* name;
  cpu::Isa isa;
  cpu::Extensions has;
};
constexpr Flavour kFlavours[] = {
    {"avx2_without_vnni", cpu::Isa::kAvx2, {}},
    {"avx2", cpu::Isa::kAvx2, {.avx_vnni = true}},
    {"avx512_without_bf16", cpu::Isa::kAvx512, {}},
    {"avx512", cpu::Isa::kAvx512, {.avx512_bf16 = true}},
    {"amx", cpu::Isa::kAmx, {.avx512_bf16 = true}},
};

// The native tables that this machine runs.
inline std::vector<NamedTable> native_tables() {
  std::vector<NamedTable> tables;
  const cpu::Extensions here = cpu::extensions_here();
  const cpu::Isa best = cpu::best_isa();
  for (const Flavour& f : kFlavours) {
    if ((f.has.avx_vnni && !here.avx_vnni) || (f.has.avx512_bf16 && !here.avx512_bf16)) continue;
    if (f.isa <= best) tables.push_back({f.name, cpu::table_of(f.isa, f.has), f.has});
    if (f.isa == cpu::Isa::kAmx && best == cpu::Isa::kAvx512) {
      trap_tile_instructions();
      tables.push_back({"amx_with_emulated_tiles", cpu::table_of(f.isa, f.has), f.has});
    }
  }
  return tables;
}

inline std::vector<NamedTable> all_tables() {
  std::vector<NamedTable> tables = native_tables();
  tables.insert(tables.begin(), {"reference", cpu::kernels_for(cpu::Isa::kReference), {}});
  if (cpu::best_isa() >= cpu::Isa::kAvx2)  // the emulation itself needs AVX2
    for (const Flavour& f : kFlavours)
      tables.push_back(
          {std::string(f.name) + "_emulated", cpu::emulated_table_of(f.isa, f.has), f.has});
  return tables;
}

}  // namespace tandem::test
