// The comparison of numbers that all tests use: a bound for each element, and a failure message
// with index, difference and expected value.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <span>

namespace tandem::test {

// |got - want| <= bound[i] for every element; NaN never passes.
template <class A, class B>
void expect_close(const A& got, const B& want, std::span<const double> bound) {
  ASSERT_EQ(std::size(got), std::size(want));
  ASSERT_EQ(std::size(bound), std::size(want));
  size_t worst = 0, failures = 0;
  double worst_ratio = -1;
  for (size_t i = 0; i < std::size(want); ++i) {
    const double ratio = std::fabs(double(got[i]) - double(want[i])) / bound[i];
    if (!(ratio <= 1)) ++failures;
    if (!(ratio <= worst_ratio)) worst_ratio = ratio, worst = i;
  }
  EXPECT_EQ(failures, 0u) << failures << " of " << std::size(want) << " outside; worst at " << worst
                          << ": got " << got[worst] << " want " << want[worst] << " bound "
                          << bound[worst];
}

template <class A, class B>
void expect_close(const A& got, const B& want, double bound) {
  expect_close(got, want, std::vector<double>(std::size(want), bound));
}

template <class Values>
double largest(const Values& values) {
  double max = 0;
  for (const auto v : values) max = std::max(max, std::fabs(double(v)));
  return max;
}

}  // namespace tandem::test
