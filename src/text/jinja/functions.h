// What templates call by name: global functions, tests and filters.
#pragma once
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja/value.h"

namespace tandem::jinja {

// range, namespace, dict, raise_exception, strftime_now
std::vector<std::pair<std::string_view, Value>> global_functions(Heap& heap);

// The tests of the template language, which follow `is`.
// The first positional argument is the value to test.
using ValueTest = bool (*)(Heap& heap, const Arguments& arguments);

ValueTest find_value_test(std::string_view name);  // null when there is none

// The first positional argument is the value that the filter is applied to.
using Filter = Value (*)(Heap& heap, const Arguments& arguments);

Filter find_filter(std::string_view name);  // null when there is none (filters.cpp)

}  // namespace tandem::jinja
