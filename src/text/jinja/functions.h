// Global functions of every template: range, namespace, dict, raise_exception, strftime_now.
#pragma once
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja/value.h"

namespace tandem::jinja {

std::vector<std::pair<std::string_view, Value>> global_functions(Heap& heap);

// The tests of the template language, which follow `is`.
// The first positional argument is the value to test.
using ValueTest = bool (*)(Heap& heap, const Arguments& arguments);

ValueTest find_value_test(std::string_view name);  // null when there is none

}  // namespace tandem::jinja
