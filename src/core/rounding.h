// Division and rounding of counts and sizes. n is 0 or more and size above 0, which is not checked.
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

}  // namespace tandem
