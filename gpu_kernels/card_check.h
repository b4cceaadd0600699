// Which card can be used, decided from what CUDA says without a call of CUDA, and what is said of
// one that fails: tests have every case on any machine.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "core/invariant.h"

namespace tandem::gpu {

// In the order in which CUDA is asked: what follows a problem is not known.
struct CardFacts {
  enum class Count : uint8_t { kDone, kDriverTooOld, kFailed };
  enum class Kernels : uint8_t { kThere, kForOthers, kPtxTooNew };

  int driver = 0;   // CUDA version that the driver knows, 1000 * major + 10 * minor; 0: no driver
  int toolkit = 0;  // that the program was built with, likewise
  Count count = Count::kDone;
  std::string count_error;  // CUDA's words for kFailed
  int n_cards = 0;
  std::string name;                   // of the first
  int major = 0, minor = 0;           // its compute capability
  Kernels kernels = Kernels::kThere;  // of this program, for it
  int compiled_for = 0;               // 10 * major + minor of their PTX; a card may be newer
};

// In one line, with what to do; empty: it can be used.
std::string why_not(const CardFacts& facts);

// Whether kernels with FP8 mma run, which begins with compute capability 8.9: the card's, and that
// for which the program was compiled.
bool has_fp8_mma(const CardFacts& facts);

// As in CardFacts; 0 where the card is emulated.
struct CudaVersions {
  int driver = 0, toolkit = 0;
};
CudaVersions cuda_versions();
// "13.0" of 13000.
std::string version_text(int cuda_version);

// What is said of work that failed on the card: CUDA's words and name for the error.
std::string failure_text(const char* what, const char* name, Caller at);

// Bytes that a card may seem to have, for tests: TANDEM_GPU_MEMORY. At 0 there is no card.
std::optional<int64_t> memory_option();
// 10 * major + minor that an emulated card has, for tests: TANDEM_GPU_CAPABILITY.
int capability_option();

}  // namespace tandem::gpu
