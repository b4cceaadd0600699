// Counts the instructions of a function by running it in single steps (x86-64 Linux).
#pragma once
#include <cstdint>
#include <functional>

namespace tandem {

struct SteppedCounts {
  int64_t all = 0;
  // Those that need a pipe of the vector unit: not moves, plain loads and stores, broadcasts from
  // memory, masks and AMX tiles.
  int64_t vector = 0;
};

// Includes a few instructions around the call. Instructions of AVX-512 and AMX that the CPU lacks
// are skipped, but for moves and what compilers compute addresses with: counts are right as long
// as no address or branch depends on the others. The CPU has AVX2.
SteppedCounts count_steps(const std::function<void()>& function);

}  // namespace tandem
