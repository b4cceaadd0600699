// Failures at run time that are not the input's fault: a lost GPU, threads that hang. The program
// exits with another status than for other Errors.
#pragma once
#include <optional>
#include <utility>

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

// A step that goes on to its end after it has failed here, because a GPU or other ranks compute the
// same step.
class StepInCommon {
 public:
  // Calls call(), unless the step has failed.
  template <class Call>
  void unless_failed(const Call& call) {
    if (failure_) return;
    try {
      call();
    } catch (const StepFailed& error) {
      failure_ = error;
    }
  }
  // Throws StepFailed if the step has failed.
  void end() {
    if (failure_) throw StepFailed(*std::exchange(failure_, {}));
  }

 private:
  std::optional<StepFailed> failure_;
};

// Throws RunError unless `ok`.
template <class... Args>
void require_run(bool ok, fmt::format_string<Args...> message, Args&&... args) {
  if (!ok) [[unlikely]]
    throw RunError(fmt::format(message, std::forward<Args>(args)...));
}

}  // namespace tandem
