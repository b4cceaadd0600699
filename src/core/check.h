// The error vocabulary of the engine: what the user can mend (Error) and what is our bug (check).
// No macros: default arguments record the caller.
#pragma once
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

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

// Who called. Clang 14 with the GNU library has no std::source_location.
struct Caller {
  const char* file;
  unsigned line;
  const char* function;
  static constexpr Caller here(const char* file = __builtin_FILE(),
                               unsigned line = __builtin_LINE(),
                               const char* function = __builtin_FUNCTION()) {
    return {file, line, function};
  }
};

// A bug in the engine. Always checked; use it outside inner loops.
inline void check(bool ok, std::string_view what = "invariant", Caller at = Caller::here()) {
  if (ok) [[likely]]
    return;
  std::fprintf(stderr, "%s:%u: %s: check failed: %.*s\n", at.file, at.line, at.function,
               static_cast<int>(what.size()), what.data());
  std::abort();
}

}  // namespace tandem
