#include "bench/serving/python_random.h"

#include <bit>
#include <cmath>

#include "core/check.h"

namespace tandem {
namespace {

// init_by_array of the Mersenne Twister's authors with a key of one word, as a seed sequence.
struct ArraySeed {
  using result_type = uint32_t;
  uint32_t key;

  template <class Iterator>
  void generate(Iterator first, Iterator last) {
    const auto n = static_cast<size_t>(last - first);
    std::vector<uint32_t> state(n);
    state[0] = 19650218;
    for (uint32_t i = 1; i < n; ++i)
      state[i] = 1812433253U * (state[i - 1] ^ (state[i - 1] >> 30)) + i;
    size_t at = 1;
    const auto mix = [&](uint32_t factor) {
      return state[at] ^ ((state[at - 1] ^ (state[at - 1] >> 30)) * factor);
    };
    const auto step = [&] {
      if (++at < n) return;
      state[0] = state[n - 1];
      at = 1;
    };
    for (size_t i = 0; i < n; ++i, step()) state[at] = mix(1664525) + key;
    for (size_t i = 1; i < n; ++i, step()) state[at] = mix(1566083941) - static_cast<uint32_t>(at);
    state[0] = 0x80000000;
    std::copy(state.begin(), state.end(), first);
  }
};

}  // namespace

PythonRandom::PythonRandom(uint32_t seed) {
  ArraySeed key{seed};
  words_.seed(key);
}

uint32_t PythonRandom::below(uint32_t n) {
  const int unused_bits = std::countl_zero(n);
  uint32_t drawn = n;
  while (drawn >= n) drawn = static_cast<uint32_t>(words_()) >> unused_bits;
  return drawn;
}

int64_t NumpyRandom::integer(int64_t low, int64_t high) {
  check(low < high && high - low <= UINT32_MAX, "a range of numbers");
  const auto most = static_cast<uint32_t>(high - 1 - low);
  if (most == 0) return low;  // draws nothing
  const uint32_t mask = UINT32_MAX >> std::countl_zero(most);
  uint32_t drawn = most + 1;
  while (drawn > most) drawn = static_cast<uint32_t>(words_()) & mask;
  return low + drawn;
}

std::vector<int> NumpyRandom::integers(int low, int high, int n) {
  std::vector<int> drawn(static_cast<size_t>(n));
  for (int& number : drawn) number = static_cast<int>(integer(low, high));
  return drawn;
}

double NumpyRandom::exponential(double mean) {
  const auto high = static_cast<uint32_t>(words_()) >> 5;
  const auto low = static_cast<uint32_t>(words_()) >> 6;
  const double uniform = (high * 67108864.0 + low) / 9007199254740992.0;  // 53 bits, in [0, 1)
  return -std::log(1 - uniform) * mean;
}

}  // namespace tandem
