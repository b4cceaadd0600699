// What a person may type after `tandem bench`.
#pragma once
#include <CLI/CLI.hpp>

#include "options.h"

namespace tandem {

// `command` becomes what was typed.
void add_bench(CLI::App& app, Options& options, Command& command);

// Throw Error for what cannot be measured with.
void require_sane(const BenchOptions& options);
void require_list(const char* option, const std::vector<int>& values, int most);
// What was typed, or what is usual.
std::vector<int> list_or(const std::vector<int>& given, const std::vector<int>& usual);

constexpr int kMostTokens = 1 << 16;
constexpr double kCardSeconds = 0.05;  // of measuring a rate of a GPU

}  // namespace tandem
