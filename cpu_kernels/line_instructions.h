// Instructions that a product executes for each 64-byte line of weights.
#pragma once
#include "cpu_kernels/kernels.h"

namespace tandem::cpu {

// With m rows of x, between two counted numbers of rows in proportion. Counted by
// tools/count_instructions.py (valgrind) for the AVX2 table without VNNI, R1's columns, and these
// formats: BF16, FP8 with 128 x 128 scales, INT8, INT4 with two levels of scales in groups of 64,
// and with BF16 scales in groups of 32. 0: not counted. Everything is included: fetching, the loops
// over blocks and panels, scales and the output.
double instructions_of_line(const KernelTable& table, WeightType type, int group, int m);

}  // namespace tandem::cpu
