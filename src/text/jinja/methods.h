// Methods of str, list and dict that templates call.
#pragma once
#include <string_view>

#include "text/jinja/value.h"

namespace tandem::jinja {

bool has_method(const Value& self, std::string_view name);

// Throws Error unless has_method(self, name) and the arguments fit.
Value call_method(Heap& heap, const Value& self, std::string_view name, const Arguments& arguments);

}  // namespace tandem::jinja
