// Reads the structures of include/tandem.h, whose callers may be compiled with an older header.
#pragma once
#include <algorithm>
#include <cstring>
#include <span>

#include "core/check.h"
#include "include/tandem.h"

namespace tandem {

// A copy of `given`, whose members beyond given.size are zero. `name` is for messages. Throws Error
// unless the size is that of a structure of this library or a smaller one.
template <class Struct>
Struct copy_of(const Struct* given, const char* name) {
  require(given != nullptr, "{} is NULL", name);
  require(given->size >= 2 * sizeof(size_t) && given->size <= sizeof(Struct),
          "{}.size is {}: set it to sizeof({}), {} in this library", name, given->size, name,
          sizeof(Struct));
  Struct copy{};
  std::memcpy(&copy, given, given->size);
  return copy;
}

// An array of the caller. Throws Error if it is missing.
template <class T>
std::span<const T> array_of(const T* items, size_t n, const char* name) {
  require(n == 0 || items != nullptr, "{} is NULL, and its number is {}", name, n);
  return {items, n};
}

}  // namespace tandem
