// The random numbers of Python's `random` and numpy's `np.random` after seed(n), with which the
// serving benchmark draws lengths, orders and arrival times. Both are the Mersenne Twister of
// Matsumoto and Nishimura, 1998; they differ in seeding and in how numbers are derived from its
// words.
#pragma once
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace tandem {

// random.seed(seed).
class PythonRandom {
 public:
  explicit PythonRandom(uint32_t seed);

  // random.shuffle(items).
  template <class T>
  void shuffle(std::vector<T>& items) {
    for (size_t i = items.size(); i-- > 1;)
      std::swap(items[i], items[below(static_cast<uint32_t>(i) + 1)]);
  }

 private:
  uint32_t below(uint32_t n);  // uniform in [0, n), n above 0

  std::mt19937 words_;
};

// np.random.seed(seed), the legacy generator.
class NumpyRandom {
 public:
  explicit NumpyRandom(uint32_t seed) : words_(seed) {}

  // np.random.randint(low, high): uniform in [low, high), which has at most 2^32 - 1 values.
  int64_t integer(int64_t low, int64_t high);
  std::vector<int> integers(int low, int high, int n);
  // np.random.exponential(mean).
  double exponential(double mean);

 private:
  std::mt19937 words_;
};

}  // namespace tandem
