// The addresses of backends, from an option of the command line or from a file.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "http/http_address.h"

namespace tandem {

// Addresses separated by commas. Throws Error for one that is malformed or there twice.
std::vector<HttpAddress> parse_backends(std::string_view text);

// One address a line; empty lines and what follows a # are ignored. Throws Error that names `file`
// and the line.
std::vector<HttpAddress> parse_backends_file(std::string_view text, const std::string& file);

}  // namespace tandem
