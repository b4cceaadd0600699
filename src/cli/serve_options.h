// Command-line options of `tandem serve`.
#pragma once
#include <CLI/CLI.hpp>

#include "cli/options.h"

namespace tandem {

void add_serve_options(CLI::App& serve, ServeOptions& options);

}  // namespace tandem
