// boost/asio/awaitable.hpp of Boost 1.74 forgets a header that it needs.
#pragma once
// clang-format off
#include <utility>
#include <boost/asio/awaitable.hpp>
// clang-format on
