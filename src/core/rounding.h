// Division, rounding and bisection of counts and sizes. n is 0 or more and size above 0, which is
// not checked.
#pragma once

namespace tandem {

template <class N, class Size>
constexpr auto ceil_div(N n, Size size) {
  return (n + size - 1) / size;
}

// The smallest multiple of `size` that is n or more.
template <class N, class Size>
constexpr auto round_up(N n, Size size) {
  return ceil_div(n, size) * size;
}

// The least n from `low` to `high` for which holds(n), found by bisection: it must then hold for
// all larger ones too. `high` is not tried.
template <class N, class Holds>
N least_where(N low, N high, const Holds& holds) {
  while (low < high) {
    const N middle = (low + high) / 2;
    if (holds(middle))
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

}  // namespace tandem
