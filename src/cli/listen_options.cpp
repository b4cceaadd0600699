#include "cli/listen_options.h"

#include <cstdio>

#include "cli/typed_options.h"
#include "core/check.h"

namespace tandem {
namespace {

// A browser's Origin header: a scheme and a host, perhaps a port, and nothing behind.
bool is_origin(const std::string& text) {
  const size_t scheme = text.starts_with("https://") ? 8 : text.starts_with("http://") ? 7 : 0;
  return scheme > 0 && text.size() > scheme &&
         text.find_first_of("/?#@ \t", scheme) == std::string::npos;
}

}  // namespace

void add_listen_options(CLI::App& command, ListenOptions& o) {
  add_value(command, "--host", o.host,
            "address to listen on; 0.0.0.0: all addresses of this machine");
  add_value(command, "--port", o.port, "port; 0: any free port");
  command
      .add_option("--api-key", o.api_key, "key that clients must send as Authorization: Bearer KEY")
      ->envname("TANDEM_API_KEY");
  auto* cert =
      command.add_option("--cert", o.certificate, "PEM file of a certificate chain, for https");
  auto* key = command.add_option("--key", o.key, "PEM file of the certificate's private key");
  cert->needs(key);
  key->needs(cert);
  command
      .add_option(
          "--cors-origin", o.cors_origins,
          "origin of a web page that may read answers, such as https://chat.example; *: any; "
          "may be repeated")
      ->allow_extra_args(false);
  add_value(command, "--drain", o.drain_seconds,
            "seconds for running answers to end after SIGTERM");
}

void require_sane(const ListenOptions& o) {
  require(o.port >= 0 && o.port < 65536, "--port {}: must be between 0 and 65535", o.port);
  require(o.drain_seconds >= 0, "--drain {}: must be 0 or more", o.drain_seconds);
  for (const std::string& origin : o.cors_origins)
    require(origin == "*" || is_origin(origin),
            "--cors-origin {}: must be *, or a scheme and a host such as https://chat.example",
            origin);
}

HttpServer::Options http_options(const ListenOptions& o) {
  return {.host = o.host,
          .port = o.port,
          .limits = {},
          .certificate = o.certificate,
          .key = o.key,
          .max_connections = 0,
          .drain = std::chrono::seconds(o.drain_seconds)};
}

std::string listening_line(const ListenOptions& o, const HttpServer& server) {
  return fmt::format("listening on {}://{}:{}", o.certificate.empty() ? "http" : "https", o.host,
                     server.port());
}

void print_line(const std::string& line) {
  const std::string ended = line + "\n";
  std::fwrite(ended.data(), 1, ended.size(), stderr);
}

}  // namespace tandem
