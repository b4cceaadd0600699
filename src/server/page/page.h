// The page at /, embedded in the program: no file beside it, nothing from elsewhere.
#pragma once
#include <string_view>

namespace tandem {

std::string_view page();

}  // namespace tandem
