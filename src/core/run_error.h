// What fails while running although the input was right: a card that is lost, threads that hang. An
// Error like any other, but that the program's exit status tells them apart.
#pragma once
#include "core/check.h"

namespace tandem {

struct RunError : Error {
  using Error::Error;
};

// Throws RunError unless `ok`.
template <class... Args>
void require_run(bool ok, fmt::format_string<Args...> message, Args&&... args) {
  if (!ok) [[unlikely]]
    throw RunError(fmt::format(message, std::forward<Args>(args)...));
}

}  // namespace tandem
