// The web page at /, embedded in the program; it loads no other files and nothing from other hosts.
#pragma once
#include <string_view>

namespace tandem {

std::string_view page();

}  // namespace tandem
