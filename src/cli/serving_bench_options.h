// Command-line options of `tandem bench serving`.
#pragma once
#include <CLI/CLI.hpp>

#include "cli/options.h"

namespace tandem {

void add_serving_bench_options(CLI::App& serving, Options& options);

}  // namespace tandem
