// tandem route: a router in front of several `tandem serve`.
#include "cli/command_options.h"
#include "cli/listen_options.h"
#include "cli/typed_options.h"
#include "core/check.h"
#include "router/backend_list.h"
#include "router/router.h"

namespace tandem {
namespace {

void require_seconds(const char* option, double seconds, double least) {
  constexpr double kMost = 86400;
  require(seconds >= least && seconds <= kMost, "{} {:g}: must be between {:g} and {:g} seconds",
          option, seconds, least, kMost);
}

void require_sane(const RouteOptions& r) {
  require_sane(static_cast<const ListenOptions&>(r));
  require_seconds("--check-interval", r.check_interval, 0.01);
  require_seconds("--check-timeout", r.check_timeout, 0.01);
  require_seconds("--connect-timeout", r.connect_timeout, 0.01);
  require_seconds("--first-byte-timeout", r.first_byte_timeout, 0);
  require(r.backends.empty() || r.backends_file.empty(),
          "--backends {} and --backends-file {}: give one of them", r.backends, r.backends_file);
  require(!r.backends.empty() || !r.backends_file.empty() || r.accepts_registration,
          "no backends: give --backends http://HOST:PORT,.. or --backends-file FILE, or let "
          "backends register with --accept-registration");
}

}  // namespace

int route_command(const Options& options) {
  const RouteOptions& r = options.route;
  require_sane(r);
  Router router({.api_key = r.api_key,
                 .backend_api_key = r.backend_api_key,
                 .cors_origins = r.cors_origins,
                 .backends_file = r.backends_file,
                 .backend_ca = r.backend_ca,
                 .accepts_registration = r.accepts_registration,
                 .check_interval = HttpClient::Seconds(r.check_interval),
                 .check_most = HttpClient::Seconds(r.check_timeout),
                 .connect_most = HttpClient::Seconds(r.connect_timeout),
                 .first_byte_most = HttpClient::Seconds(r.first_byte_timeout),
                 .log =
                     [quiet = options.quiet](const std::string& line) {
                       if (!quiet) print_line(line);
                     }},
                r.backends.empty() ? std::vector<HttpAddress>() : parse_backends(r.backends));
  HttpServer server(router, http_options(r));
  if (!options.quiet) print_line(listening_line(r, server));
  server.run();
  return 0;
}

void add_route(CLI::App& app, Options& options, Command& command) {
  RouteOptions& r = options.route;
  CLI::App* route = app.add_subcommand("route", "a router in front of several `tandem serve`");
  route->footer(
      "Examples:\n"
      "  tandem route --backends http://127.0.0.1:8001,http://127.0.0.1:8002\n"
      "  tandem route --backends-file backends.txt --host 0.0.0.0 --api-key SECRET\n"
      "  tandem route --accept-registration     and tandem serve .. --proxy-url http://HOST:8000");
  route->callback([&command] { command = route_command; });
  route->add_option(
      "--backends", r.backends,
      "addresses of the servers, separated by commas: http://HOST:PORT,https://HOST:PORT,..");
  route->add_option("--backends-file", r.backends_file,
                    "file with an address a line, which is read again when it changes");
  route->add_flag("--accept-registration", r.accepts_registration,
                  "let servers add themselves (serve --proxy-url), with the key of --api-key if "
                  "there is one");
  add_listen_options(*route, r);
  route->add_option("--backend-api-key", r.backend_api_key,
                    "key of the backends; without it they get what clients send");
  route->add_option("--backend-ca", r.backend_ca,
                    "PEM file with the authority, or the certificate, of backends with https; "
                    "without it, what this system trusts");
  add_value(*route, "--check-interval", r.check_interval, "seconds between checks of a backend");
  add_value(*route, "--check-timeout", r.check_timeout, "seconds for a backend to answer a check");
  add_value(*route, "--connect-timeout", r.connect_timeout, "seconds to connect to a backend");
  add_value(*route, "--first-byte-timeout", r.first_byte_timeout,
            "seconds for a backend to begin an answer, before another one is asked; 0: as long as "
            "it answers checks");
  route->add_flag("-q,--quiet", options.quiet, "do not print when backends go up and down");
}

}  // namespace tandem
