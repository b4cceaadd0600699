// Global functions of every template: range, namespace, dict, raise_exception, strftime_now.
#pragma once
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja/value.h"

namespace tandem::jinja {

std::vector<std::pair<std::string_view, Value>> global_functions(Heap& heap);

}  // namespace tandem::jinja
