// Loops that find out what one core can do at most: read memory, or repeat one arithmetic
// instruction on registers. They compute nothing of use; the products of the engine are judged by
// their speed.
#pragma once
#include <cstdint>

namespace tandem::cpu {

enum class Arithmetic : uint8_t { kF32, kBF16, kInt8 };
constexpr int kNumArithmetics = 3;

enum class Feature : uint8_t {
  kBaseline,  // any x86-64
  kAvx2,      // with FMA
  kAvxVnni,
  kAvx512,  // F and BW
  kAvx512Vnni,
  kAvx512Bf16,
  kAmxInt8,
  kAmxBf16,
};

// One instruction, or the shortest sequence that multiplies and adds, on enough independent
// registers to hide its latency.
struct PeakLoop {
  const char* instruction;
  Arithmetic type;
  Feature needs;
  int64_t ops_per_round;  // a multiplication and an addition are two
  void (*run)(int64_t n_rounds);
};

// Reads every byte of [from, from + bytes) once; both are multiples of kReadBlock.
struct ReadLoop {
  const char* name;
  Feature needs;
  void (*run)(const void* from, int64_t bytes);
};
constexpr int64_t kReadBlock = 4096;

struct SpeedLoops {
  const PeakLoop* peaks;
  int n_peaks;
  const ReadLoop* reads;
  int n_reads;
};

// All loops of the program, a list an island. Run only those whose feature the CPU has.
constexpr int kNumSpeedLoops = 4;
SpeedLoops speed_loops(int island);

// Asks the system for the tiles of AMX, which it keeps from a process until then.
bool cpu_has(Feature feature);

}  // namespace tandem::cpu
