// The finaliser of SplitMix64 (Steele, Lea and Flood: Fast Splittable Pseudorandom Number
// Generators, 2014): numbers that are as good as random from those of a counter, on CPUs and GPUs.
#pragma once
#include <cstdint>

namespace tandem {

constexpr uint64_t kSplitMixStep = 0x9e3779b97f4a7c15;  // of the counter

constexpr uint64_t split_mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

}  // namespace tandem
