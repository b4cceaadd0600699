// Options of the commands that listen: `tandem serve` and `tandem route`.
#pragma once
#include <CLI/CLI.hpp>

#include "cli/options.h"
#include "http/http_server.h"

namespace tandem {

void add_listen_options(CLI::App& command, ListenOptions& options);
// Throws Error for a value out of range.
void require_sane(const ListenOptions& options);
HttpServer::Options http_options(const ListenOptions& options);
// "listening on http://127.0.0.1:8000".
std::string listening_line(const ListenOptions& options, const HttpServer& server);
// Writes a line to standard error. Ignores errors of writing, such as a full disk: serving goes on.
void print_line(const std::string& line);

}  // namespace tandem
