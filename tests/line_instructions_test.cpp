// The counts of cpu_kernels/line_instructions.h against the compiled kernels.
#include "cpu_kernels/line_instructions.h"

#include <gtest/gtest.h>

#include "benchmarks/counted_product.h"
#include "cpu_kernels/peaks.h"
#include "cpu_kernels/tables.h"

namespace tandem {
namespace {

// Counted with GCC 12; another version may count a little differently.
constexpr double kTolerance = 0.15;

void expect_counts(cpu::Isa isa, const CountedFormat& format, int m) {
  const cpu::KernelTable table = table_of(isa, {.avx512_bf16 = true});
  const InstructionsOfLine line = count_line(isa, format, m);
  const double counted = isa == cpu::Isa::kAvx2 ? line.all : line.vector;
  const double expected = instructions_of_line(table, format.type, format.group, m);
  EXPECT_NEAR(counted, expected, kTolerance * expected + 0.1)
      << table.name << ", " << format.name << ", " << m << " rows";
  EXPECT_GE(line.all, line.vector);
}

TEST(LineInstructions, AreThoseOfTheCompiledKernels) {
  if (!cpu::cpu_has(cpu::Feature::kAvx2)) GTEST_SKIP() << "no AVX2";
  for (const CountedFormat& format : kCountedFormats) {
    for (const int m : {1, 4}) expect_counts(cpu::Isa::kAvx512, format, m);
    for (const int m : {2, 4}) expect_counts(cpu::Isa::kAmx, format, m);
  }
}

// Every instruction is a trap of the operating system, so one row.
TEST(LineInstructions, AreThoseOfTheCompiledAvx2Kernels) {
  if (!cpu::cpu_has(cpu::Feature::kAvx2) || cpu::cpu_has(cpu::Feature::kAvxVnni))
    GTEST_SKIP() << "counted for CPUs with AVX2 and without AVX-VNNI";
  for (const CountedFormat& format : kCountedFormats) expect_counts(cpu::Isa::kAvx2, format, 1);
}

}  // namespace
}  // namespace tandem
