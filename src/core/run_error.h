// Failures at run time that are not the input's fault: a lost GPU, threads that hang. The program
// exits with another status than for other Errors.
#pragma once
#include "core/check.h"

namespace tandem {

// What std::bad_alloc means to a user of the commands.
inline constexpr const char* kNoMemoryLeft =
    "no memory is left: use a smaller model or a smaller --ctx";

struct RunError : Error {
  using Error::Error;
};

// A step could not be computed, but later ones may be: what it needs can come back.
struct StepFailed : RunError {
  using RunError::RunError;
};

// Throws RunError unless `ok`.
template <class... Args>
void require_run(bool ok, fmt::format_string<Args...> message, Args&&... args) {
  if (!ok) [[unlikely]]
    throw RunError(fmt::format(message, std::forward<Args>(args)...));
}

}  // namespace tandem
