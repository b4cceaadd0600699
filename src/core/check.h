// How the engine reports failures: Error for what the user can fix, check (core/invariant.h) for
// bugs of the engine.
#pragma once
#include <fmt/format.h>

#include <stdexcept>
#include <string>

#include "core/invariant.h"

namespace tandem {

// A problem the user can act on: a missing file, a wrong shape, a request that is too long. The
// message is one line, names the values and says what to do. Thrown while loading or admitting a
// request, never inside a step.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> message, Args&&... args) {
  throw Error(fmt::format(message, std::forward<Args>(args)...));
}

// Throws Error unless `ok`. The message is formatted only on failure.
template <class... Args>
void require(bool ok, fmt::format_string<Args...> message, Args&&... args) {
  if (!ok) [[unlikely]]
    fail(message, std::forward<Args>(args)...);
}

}  // namespace tandem
