// The tests of the template language, which follow `is`.
#pragma once
#include <string_view>

#include "text/jinja/value.h"

namespace tandem::jinja {

// The first positional argument is the value to test.
using ValueTest = bool (*)(Heap& heap, const Arguments& arguments);

ValueTest find_value_test(std::string_view name);  // null when there is none

}  // namespace tandem::jinja
