// tandem serve: the HTTP server for the engine. The main thread serves connections; those of
// EngineThread load the model, compute, convert tokens to text and compute grammar masks.
#include "cli/command_options.h"
#include "cli/console.h"
#include "cli/conversation.h"
#include "cli/listen_options.h"
#include "cli/ranks.h"
#include "cli/typed_options.h"
#include "http/http_server.h"
#include "io/json.h"
#include "loader/engine_thread.h"
#include "prefill/kv_client.h"
#include "prefill/kv_server.h"
#include "server/registration.h"
#include "server/service.h"
#include "transport/tcp.h"

namespace tandem {
namespace {

bool moves(const ServeOptions& s) { return s.rebalance != Rebalance::kOff || s.live_hot_experts; }

void require_sane(const ServeOptions& s, const WorkerOptions& workers) {
  require_sane(static_cast<const ListenOptions&>(s));
  require(s.max_batch >= 1 && s.max_batch <= kMaxStepTokens,
          "--max-batch {}: must be between 1 and {}", s.max_batch, kMaxStepTokens);
  require(!s.chunk || (*s.chunk >= 1 && *s.chunk <= kMaxStepTokens),
          "--chunk {}: must be between 1 and {}", s.chunk.value_or(0), kMaxStepTokens);
  require(s.kv_tokens >= 0, "--kv-tokens {}: must be 0 or more", s.kv_tokens);
  require(s.kv_fraction > 0 && s.kv_fraction < 1, "--kv-fraction {}: must be between 0 and 1",
          s.kv_fraction);
  require(s.balance_window >= 0 && s.balance_window <= ExpertWindow::kMaxSteps,
          "--balance-window {}: must be between 0 and {}", s.balance_window,
          ExpertWindow::kMaxSteps);
  require(!moves(s) || s.balance_window > 0,
          "--balance-window 0: {} needs the uses of experts: leave one of them out",
          s.live_hot_experts ? "--hot-experts live" : "--rebalance");
  require(
      !s.live_hot_experts || s.rebalance == Rebalance::kOff,
      "--hot-experts live is for a GPU and the CPU beside it, --rebalance for ranks and workers: "
      "leave one of them out");
  require(!s.live_hot_experts || !workers.any(),
          "--hot-experts live and --workers: experts do not move between a GPU and the CPU beside "
          "it while workers have others: leave one of them out");
  require(s.rebalance_below > 0 && s.rebalance_below <= 1,
          "--rebalance-below {}: must be above 0 and at most 1", s.rebalance_below);
  require(s.rebalance_period >= 0, "--rebalance-period {}: must be 0 or more", s.rebalance_period);
  require(s.role != ServerRole::kDecode || !s.prefill.empty(),
          "--role decode: say with --prefill which servers compute the prompts");
  require(s.role == ServerRole::kDecode || s.prefill.empty(),
          "--prefill is for --role decode: give that, or leave it out");
  require(s.role != ServerRole::kDecode || !s.no_prefix_cache,
          "--role decode: keys that arrive are kept in the prefix cache: leave --no-prefix-cache "
          "out");
  for (const std::string& address : s.prefill) require_tcp_address(address);
  s.kv_secret.read();
  require(s.prefill_from >= 1, "--prefill-from {}: must be 1 or more", s.prefill_from);
  require(!s.proxy_url.empty() || s.node_url.empty(),
          "--node-url {}: needs --proxy-url, the router that gets it", s.node_url);
  require(!s.proxy_url.empty() || s.proxy_ca.empty(),
          "--proxy-ca {}: needs --proxy-url, the router that it belongs to", s.proxy_ca);
}

ModelOptions model_options(const Options& options) {
  const ServeOptions& s = options.serve;
  ModelOptions model = options.model;
  model.step_tokens = s.chunk;
  model.kv_fraction = s.kv_fraction;
  model.count_experts = s.balance_window > 0;
  model.moves_experts = moves(s);
  model.identifies = s.role != ServerRole::kBoth;
  const ModelConfig config = ModelConfig::from_directory(model.directory);
  require_sound(model.simulated_routing, config, model.ranks.group ? model.ranks.group->size() : 1);
  return for_many_sequences(std::move(model), config, s.max_batch, s.kv_tokens);
}

SamplingDefaults defaults_of(const std::string& directory) {
  const std::string file = directory + "/generation_config.json";
  if (!std::filesystem::exists(file)) return {};
  return sampling_defaults(parse_json(read_text_file(file, 1 << 20), file));
}

// A base model has no chat template; then chat is not served.
std::unique_ptr<ChatFormat> chat_format(const Options& options, const Tokenizer& tokenizer) {
  try {
    return std::make_unique<ChatFormat>(options.model.directory, tokenizer);
  } catch (const Error& error) {
    options.model.warn(fmt::format("/v1/chat/completions is not served: {}", error.what()));
    return nullptr;
  }
}

std::string ready_line(const Engine& engine, const LoadedModel& loaded) {
  const int64_t n_tokens = int64_t{engine.counts().scheduler.n_pages} * kPageSize;
  const int64_t n_on_host = int64_t{engine.counts().scheduler.n_host_pages} * kPageSize;
  const int n = engine.grid().n_replicas;
  return fmt::format("ready: context {}, KV cache of {} tokens ({:.2f} GB{}){}, {} threads, {}",
                     loaded.context(), n_tokens,
                     KvCache::bytes_for(loaded.config(), n_tokens, loaded.cache_type()) * 1e-9,
                     n > 1 ? fmt::format(", in {} replicas", n) : "",
                     n_on_host > 0 ? fmt::format(", of {} in host memory", n_on_host) : "",
                     loaded.n_threads(), loaded.isa());
}

std::optional<Rebalancer::Options> rebalance_options(const ServeOptions& s) {
  if (!moves(s)) return {};
  constexpr double kMissed = 0.95;  // of the GPU's best share
  Rebalancer::Options options = {.period = std::chrono::duration<double>(s.rebalance_period)};
  if (s.live_hot_experts)
    options.is_due = [](const ExpertUses& uses, const ExpertHomes& homes) {
      return misses_hot_experts(uses, homes, kMissed);
    };
  else if (s.rebalance == Rebalance::kAuto)
    options.is_due = [below = s.rebalance_below](const ExpertUses& uses, const ExpertHomes& homes) {
      return is_uneven(uses, homes, below);
    };
  return options;
}

// What a prefill server tells, and a decode server compares.
KvWelcome kv_welcome(LoadedModel& loaded) {
  return {.model = loaded.identity(),
          .key_bytes = loaded.model().key_bytes(loaded.cache()),
          .page_size = kPageSize,
          .max_tokens = loaded.context(),
          .cache_type = format_name({loaded.cache_type()}),
          .arithmetic = loaded.arithmetic()};
}

// Connections to other servers, for the roles; outlives what computes.
struct Roles {
  std::unique_ptr<Transport> transport;
  std::unique_ptr<KvServer> keys;
};

// Prints what becomes of other servers.
std::function<void(const std::string&)> noter(bool quiet) {
  return [quiet](const std::string& line) {
    if (!quiet) print_line(line);
  };
}

Roles start_roles(const Options& options) {
  const ServeOptions& s = options.serve;
  if (s.role == ServerRole::kBoth) return {};
  const auto note = noter(options.quiet);
  Roles roles = {tcp_transport(), nullptr};
  if (s.role == ServerRole::kDecode) return roles;
  roles.keys = std::make_unique<KvServer>(*roles.transport,
                                          KvServer::Options{s.kv_listen, s.kv_secret.read(), note});
  note("keys of prompts: listening on " + with_port(s.kv_listen, roles.keys->port()));
  return roles;
}

// Null without --proxy-url.
std::unique_ptr<Registration> registration_of(const ServeOptions& s, bool quiet) {
  if (s.proxy_url.empty()) return nullptr;
  const std::string scheme = s.certificate.empty() ? "http://" : "https://";
  std::string url;
  if (!s.node_url.empty()) {
    const HttpAddress node = parse_http_address(s.node_url, "--node-url");
    require(node.tls || s.certificate.empty(),
            "--node-url {}: this server speaks TLS (--cert): write https://{}", s.node_url,
            node.authority);
    url = node.url();
  } else if (s.host != "0.0.0.0" && s.host != "::") {
    url = scheme + (s.host.find(':') == std::string::npos ? s.host : "[" + s.host + "]");
  }
  return std::make_unique<Registration>(
      Registration::Options{.router = parse_http_address(s.proxy_url, "--proxy-url"),
                            .url = url,
                            .scheme = scheme,
                            .router_ca = s.proxy_ca,
                            .adds_port = s.node_url.empty(),
                            .api_key = s.proxy_api_key.empty() ? s.api_key : s.proxy_api_key,
                            .log = noter(quiet)});
}

// Loads the model and computes for the service. Ends the server when either fails.
std::unique_ptr<EngineThread> start_engine(const Options& options, ModelOptions model,
                                           const Tokenizer& tokenizer, Service& service,
                                           HttpServer& server, Roles& roles,
                                           Registration* registration) {
  const auto progress = [&service, shown = load_progress(options.quiet)](
                            int64_t done, int64_t total, double rate) {
    if (shown) shown(done, total, rate);
    service.set_loading(total > 0 ? static_cast<double>(done) / static_cast<double>(total) : 0);
  };
  const auto on_ready = [&service, &roles, registration, quiet = options.quiet](
                            Engine& engine, LoadedModel& loaded) {
    if (roles.keys) roles.keys->begin(engine, kv_welcome(loaded));
    service.set_ready(engine);
    if (!quiet) print_line(ready_line(engine, loaded));
    if (registration) registration->start();
  };
  const auto on_failed = [&service, &server] {
    if (service.is_ready())
      server.shut_down();
    else
      server.stop();
  };
  const ServeOptions& s = options.serve;
  std::function<std::unique_ptr<PrefixSource>(LoadedModel&)> prefixes;
  if (s.role == ServerRole::kDecode)
    prefixes = [&options, &s, &roles](LoadedModel& loaded) {
      return std::make_unique<KvClient>(*roles.transport,
                                        KvClient::Options{.addresses = s.prefill,
                                                          .secret = s.kv_secret.read(),
                                                          .least_tokens = s.prefill_from,
                                                          .note = noter(options.quiet)},
                                        kv_welcome(loaded));
    };
  return std::make_unique<EngineThread>(tokenizer,
                                        EngineThread::Options{.model = std::move(model),
                                                              .progress = progress,
                                                              .max_running = s.max_batch,
                                                              .keeps_pages = !s.no_prefix_cache,
                                                              .async_output = !s.no_async_output,
                                                              .expert_window = s.balance_window,
                                                              .rebalance = rebalance_options(s),
                                                              .prefixes = std::move(prefixes)},
                                        EngineThread::Hooks{on_ready, on_failed});
}

}  // namespace

int serve_command(const Options& options) {
  const ServeOptions& s = options.serve;
  require_sane(s, options.model.workers);
  ModelOptions model = model_options(options);
  if (model.ranks.follow()) return follow({model});
  const Tokenizer tokenizer = Tokenizer::from_directory(options.model.directory);
  const bool simulates = options.model.simulated_routing.kind != SimulatedRouting::Kind::kModel;
  Service service(
      tokenizer, chat_format(options, tokenizer), defaults_of(options.model.directory),
      {.model_id = s.served_model_name.empty() ? options.model.directory : s.served_model_name,
       .root = options.model.directory,
       .role = s.role == ServerRole::kBoth ? "" : name_of(s.role),
       .simulated_routing = simulates ? name_of(options.model.simulated_routing) : "",
       .api_key = s.api_key,
       .cors_origins = s.cors_origins,
       .log = [&](const std::string& line) {
         if (s.log_requests) print_line(line);
       }});
  const auto registration = registration_of(s, options.quiet);
  HttpServer::Options listening = http_options(s);
  if (registration) listening.on_drain = [&] { registration->begin_to_stop(); };
  HttpServer server(service, listening);
  if (registration) registration->set_port(server.port());
  if (!options.quiet) print_line(listening_line(s, server));
  Roles roles = start_roles(options);
  const auto computing = start_engine(options, std::move(model), tokenizer, service, server, roles,
                                      registration.get());
  server.run();
  if (roles.keys) roles.keys->end();
  computing->stop();
  computing->rethrow();
  return 0;
}

void add_serve_options(CLI::App& serve, ServeOptions& s) {
  add_listen_options(serve, s);
  serve.add_option("--served-model-name", s.served_model_name,
                   "model name for clients; without it, MODEL as given");
  serve.add_option("--proxy-url", s.proxy_url,
                   "router, http://HOST:PORT or https://HOST:PORT, at which this server registers "
                   "when it is ready: `tandem route --accept-registration`");
  serve.add_option("--node-url", s.node_url,
                   "address under which that router reaches this server; without it, from --host "
                   "and --port");
  serve.add_option("--proxy-api-key", s.proxy_api_key,
                   "key of that router; without it, that of --api-key");
  serve.add_option("--proxy-ca", s.proxy_ca,
                   "PEM file with the authority, or the certificate, of a router with https; "
                   "without it, what this system trusts");
  // LMDeploy's options without a name here.
  const std::pair<const char*, const char*> others[] = {
      {"--backend", "there is one engine: leave it out"},
      {"--log-level", "warnings and errors are always printed: leave it out, or use --quiet"}};
  for (const auto& [name, advice] : others)
    hide(*serve.add_option_function<std::string>(
        name, [name = name, advice = advice](const std::string& value) {
          fail("{} {}: {}", name, value, advice);
        }));
  // The second names are LMDeploy's.
  add_value(serve, "--max-batch,--max-batch-size", s.max_batch,
            "maximum number of sequences per step; others wait");
  serve
      .add_option("--chunk,--max-prefill-token-num", s.chunk,
                  "tokens per step: one of every running answer, the rest from waiting prompts; a "
                  "smaller number gives steadier streams and slower prompts")
      ->default_str(std::to_string(kStepTokens));
  serve.add_option("--kv-tokens", s.kv_tokens,
                   "tokens of KV cache for all sequences; 0: as many as --kv-fraction allows");
  add_value(serve, "--kv-fraction,--cache-max-entry-count", s.kv_fraction,
            "fraction of the memory left after loading for the KV cache");
  add_value(serve, "--balance-window", s.balance_window,
            "steps for which /experts and /metrics count how often each expert is chosen; 0: they "
            "do not");
  add_choice(
      serve, "--rebalance", s.rebalance,
      {{"off", Rebalance::kOff}, {"on-request", Rebalance::kOnRequest}, {"auto", Rebalance::kAuto}},
      "move experts between ranks, or between workers with --experts-move, while answers go on, so "
      "that all have as much to compute: when POST /rebalance is called, or also by itself; takes "
      "memory for one layer's experts on each rank or worker");
  add_value(serve, "--rebalance-below", s.rebalance_below,
            "with auto: balancedness (mean over largest load of the ranks) that begins it");
  add_value(serve, "--rebalance-period", s.rebalance_period,
            "with auto, and with live hot experts: seconds from one move to the next");
  add_choice(serve, "--hot-experts", s.live_hot_experts, {{"static", false}, {"live", true}},
             "live: a GPU gets the experts that are used most now from the CPU beside it, in "
             "exchange for others, while answers go on");
  add_choice(serve, "--role", s.role,
             {{name_of(ServerRole::kBoth), ServerRole::kBoth},
              {name_of(ServerRole::kPrefill), ServerRole::kPrefill},
              {name_of(ServerRole::kDecode), ServerRole::kDecode}},
             "prefill: compute prompts for decode servers too, which connect to --kv-listen; "
             "decode: fetch the keys of long prompts from the servers of --prefill");
  add_value(serve, "--kv-listen", s.kv_listen,
            "HOST:PORT on which a prefill server listens for decode servers; port 0: any free "
            "port");
  serve
      .add_option("--prefill", s.prefill,
                  "HOST:PORT of prefill servers, separated by commas, for a decode server")
      ->delimiter(',')
      ->allow_extra_args(false);
  add_value(serve, "--prefill-from", s.prefill_from,
            "tokens of a prompt that are not cached from which they are fetched");
  add_secret(serve, "--kv", s.kv_secret,
             "file with a secret that prefill and decode servers share; needed where other "
             "machines can connect");
  serve.add_flag("--no-prefix-cache", s.no_prefix_cache,
                 "free the KV cache of a prompt when its answer has ended");
  serve.add_flag("--no-async-output", s.no_async_output,
                 "detokenize between steps instead of concurrently");
  serve.add_flag("--log-requests", s.log_requests,
                 "print a line on standard error for each answer");
}

}  // namespace tandem
