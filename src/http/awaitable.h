// boost/asio/awaitable.hpp of Boost 1.74 needs <utility> but does not include it.
#pragma once
// clang-format off
#include <utility>
#include <boost/asio/awaitable.hpp>
// clang-format on
