// Loops that measure the peak of one core: memory reads, or one arithmetic instruction repeated on
// registers. Their results are unused; the engine's products are compared with their speed.
#pragma once
#include <cstdint>

namespace tandem::cpu {

enum class Arithmetic : uint8_t { kF32, kBF16, kInt8 };
constexpr int kNumArithmetics = 3;

enum class Feature : uint8_t {
  kBaseline,  // any x86-64
  kAvx2,      // including FMA
  kAvxVnni,
  kAvx512,  // F and BW
  kAvx512Vnni,
  kAvx512Bf16,
  kAmxInt8,
  kAmxBf16,
};

// One instruction, or the shortest multiply-add sequence, on enough independent registers to hide
// its latency.
struct PeakLoop {
  const char* instruction;
  Arithmetic type;
  Feature needs;
  int64_t ops_per_round;  // a multiplication and an addition count as two
  void (*run)(int64_t n_rounds);
};

// Instructions that tiles of products mix and that instructions_of_line() counts, on independent
// registers: as many as a core can start.
struct StartLoop {
  Feature needs;
  int64_t instructions_per_round;
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
  const StartLoop* start = nullptr;
};

// The loops of one island; run only loops with a feature that the CPU has.
constexpr int kNumSpeedLoops = 4;
SpeedLoops speed_loops(int island);

// Also requests the AMX tiles, which Linux denies to a process until then.
bool cpu_has(Feature feature);

}  // namespace tandem::cpu
