// The filters of the template language.
#pragma once
#include <string_view>

#include "text/jinja/value.h"

namespace tandem::jinja {

// The first positional argument is the value that the filter is applied to.
using Filter = Value (*)(Heap& heap, const Arguments& arguments);

Filter find_filter(std::string_view name);  // null when there is none

}  // namespace tandem::jinja
