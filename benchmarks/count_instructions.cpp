// Prints the tables of cpu_kernels/line_instructions.cpp: count_instructions [avx2|avx512|amx ..].
// For each format all instructions and those for vector pipes, per 64-byte line of weights.
#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "benchmarks/counted_product.h"
#include "cpu_kernels/line_instructions.h"
#include "cpu_kernels/peaks.h"

using namespace tandem;

namespace {

void print(cpu::Isa isa) {
  std::printf("%-20s", cpu::name_of(isa));
  for (const int m : cpu::kCountedRows) std::printf("%9d", m);
  std::printf("\n");
  for (const CountedFormat& format : kCountedFormats) {
    InstructionsOfLine lines[cpu::kNumCountedRows];
    for (int i = 0; i < cpu::kNumCountedRows; ++i)
      lines[i] = count_line(isa, format, cpu::kCountedRows[i]);
    std::printf("%-13s all   ", format.name);
    for (const InstructionsOfLine& line : lines) std::printf("%9.1f", line.all);
    std::printf("\n%-13s vector", "");
    for (const InstructionsOfLine& line : lines) std::printf("%9.1f", line.vector);
    std::printf("\n");
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (!cpu::cpu_has(cpu::Feature::kAvx2)) {
    std::fprintf(stderr, "error: products are counted on a CPU with AVX2\n");
    return 2;
  }
  for (const cpu::Isa isa : {cpu::Isa::kAvx2, cpu::Isa::kAvx512, cpu::Isa::kAmx}) {
    bool wanted = argc == 1;
    for (int i = 1; i < argc; ++i) wanted |= std::strcmp(argv[i], cpu::name_of(isa)) == 0;
    if (wanted) print(isa);
  }
}
