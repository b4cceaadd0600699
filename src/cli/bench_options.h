// Command-line options of `tandem bench`.
#pragma once
#include <CLI/CLI.hpp>

#include "cli/options.h"

namespace tandem {

// `command` is set to the chosen subcommand.
void add_bench(CLI::App& app, Options& options, Command& command);

// Throw Error for values that cannot be measured with.
void require_sane(const BenchOptions& options);
void require_list(const char* option, const std::vector<int>& values, int most);
// `given`, or `usual` if it is empty.
std::vector<int> list_or(const std::vector<int>& given, const std::vector<int>& usual);

constexpr int kMaxTokens = 1 << 16;
constexpr double kGpuSeconds = 0.05;  // time to measure one rate of a GPU

}  // namespace tandem
