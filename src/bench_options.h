// What a person may type after `tandem bench`.
#pragma once
#include <CLI/CLI.hpp>

#include "options.h"

namespace tandem {

// `command` becomes what was typed.
void add_bench(CLI::App& app, Options& options, Command& command);

}  // namespace tandem
