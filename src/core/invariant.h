// Checks of conditions that hold unless the engine has a bug. Separate from check.h because nvcc
// does not compile {fmt}. No macros: default arguments record the caller.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace tandem {

// The source location of a call. Clang 14 with libstdc++ has no std::source_location.
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

// Aborts with file, line and `what` unless `ok`. Active in every build; for use outside inner
// loops.
inline void check(bool ok, std::string_view what = "invariant", Caller at = Caller::here()) {
  if (ok) [[likely]]
    return;
  std::fprintf(stderr, "%s:%u: %s: check failed: %.*s\n", at.file, at.line, at.function,
               static_cast<int>(what.size()), what.data());
  std::abort();
}

}  // namespace tandem
