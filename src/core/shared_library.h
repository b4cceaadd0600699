// A library that is opened at run time, so that the program starts without it. It stays loaded.
#pragma once
#include <dlfcn.h>

#include <span>
#include <type_traits>

namespace tandem {

class SharedLibrary {
 public:
  SharedLibrary() = default;
  // Opens the first of `names` that exists. With kGlobal, libraries that this one opens find its
  // symbols.
  enum class Symbols { kLocal, kGlobal };
  explicit SharedLibrary(std::span<const char* const> names, Symbols symbols = Symbols::kLocal) {
    const int flags = RTLD_NOW | (symbols == Symbols::kGlobal ? RTLD_GLOBAL : RTLD_LOCAL);
    for (const char* name : names) {
      handle_ = dlopen(name, flags);
      name_ = name;
      if (handle_) return;
    }
  }
  explicit operator bool() const { return handle_ != nullptr; }
  // The name under which it was opened.
  const char* name() const { return name_; }

  // The address of an object; null: there is none of this name.
  void* object(const char* name) const { return dlsym(handle_, name); }
  // Sets `function`, a pointer to a function, to the one of this name, or to null; returns whether
  // there is one.
  template <class F>
  bool find(F*& function, const char* name) const {
    static_assert(std::is_function_v<F>);
    function = reinterpret_cast<F*>(object(name));
    return function != nullptr;
  }

 private:
  void* handle_ = nullptr;
  const char* name_ = "";
};

}  // namespace tandem
