// The instructions that one product executes, counted by running it in single steps.
#pragma once
#include <cstdint>

#include "cpu_kernels/kernels.h"

namespace tandem {

// Instructions per 64-byte line of weights, as stepping.h counts them.
struct InstructionsOfLine {
  double all = 0, vector = 0;
};

// A format of weights as cpu_kernels/line_instructions.h has it.
struct CountedFormat {
  const char* name;
  cpu::WeightType type;
  int group;  // columns that share a scale of INT4
};
constexpr CountedFormat kCountedFormats[] = {
    {"bf16", cpu::WeightType::kBF16, 0},        {"fp8", cpu::WeightType::kF8E4M3, 0},
    {"int8", cpu::WeightType::kI8, 0},          {"int4", cpu::WeightType::kI4TwoLevel, 64},
    {"int4-32-bf16", cpu::WeightType::kI4, 32},
};

// With m rows of x, everything included but what a call costs. Counts the table of `isa` without
// AVX-VNNI, with AVX512-BF16, on any CPU with AVX2.
InstructionsOfLine count_line(cpu::Isa isa, const CountedFormat& format, int m);

}  // namespace tandem
