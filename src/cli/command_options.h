// Command-line options of `tandem bench`, `selftest`, `serve`, `worker` and `route`, each beside
// its command.
#pragma once
#include <CLI/CLI.hpp>

#include "cli/options.h"

namespace tandem {

// `command` is set to the chosen subcommand.
void add_bench(CLI::App& app, Options& options, Command& command);
void add_serving_bench(CLI::App& bench, Options& options, Command& command);
// `tandem selftest`.
void add_selftest(CLI::App& app, Options& options, Command& command);
// `tandem route`.
void add_route(CLI::App& app, Options& options, Command& command);
void add_serve_options(CLI::App& serve, ServeOptions& options);
// `tandem worker`, and the options of commands that use workers, which may come and go with a file.
void add_worker(CLI::App& app, Options& options, Command& command);
void add_workers(CLI::App& command, WorkerOptions& workers);
void add_workers_file(CLI::App& command, WorkerOptions& workers);

// Throws Error unless the file of --plot can be written. Creates it if it does not exist.
void require_writable_plot(const std::string& file);
void write_plot(const std::string& file, const std::string& svg);

}  // namespace tandem
