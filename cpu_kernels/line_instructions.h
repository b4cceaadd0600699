// Instructions that a product executes for each 64-byte line of weights.
#pragma once
#include "cpu_kernels/kernels.h"

namespace tandem::cpu {

// The numbers of rows of x that are counted; others follow in proportion.
constexpr int kNumCountedRows = 11;
constexpr int kCountedRows[kNumCountedRows] = {1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 128};

// Those that limit a core, with m rows of x: with AVX2 all, with AVX-512 and AMX those for the
// vector pipes, of which a core starts two a cycle (Zen 5: four) while it starts the others too.
// Counted by benchmarks/count_instructions for AVX2 without VNNI, AVX-512 with BF16 and VNNI, and
// AMX, and these formats: BF16, FP8 with 128 x 128 scales, INT8, INT4 with two levels of scales in
// groups of 64, and with BF16 scales in groups of 32. 0: not counted. Everything is included:
// fetching, the loops over blocks and panels, scales and the output.
double instructions_of_line(const KernelTable& table, WeightType type, int group, int m);

}  // namespace tandem::cpu
