#include "cli/serve_options.h"

namespace tandem {

void add_serve_options(CLI::App& serve, ServeOptions& s) {
  serve
      .add_option("--host", s.host, "address to listen on; 0.0.0.0: all addresses of this machine")
      ->capture_default_str();
  serve.add_option("--port", s.port, "port; 0: any free port")->capture_default_str();
  serve.add_option("--served-model-name", s.served_model_name,
                   "model name for clients; without it, MODEL as given");
  serve
      .add_option("--api-key", s.api_key, "key that clients must send as Authorization: Bearer KEY")
      ->envname("TANDEM_API_KEY");
  auto* cert =
      serve.add_option("--cert", s.certificate, "PEM file of a certificate chain, for https");
  auto* key = serve.add_option("--key", s.key, "PEM file of the certificate's private key");
  cert->needs(key);
  key->needs(cert);
  serve
      .add_option(
          "--cors-origin", s.cors_origins,
          "origin of a web page that may read answers, such as https://chat.example; *: any; "
          "may be repeated")
      ->allow_extra_args(false);
  serve.add_option("--max-batch", s.max_batch, "maximum number of sequences per step; others wait")
      ->capture_default_str();
  serve
      .add_option(
          "--chunk", s.chunk,
          "tokens per step: one of every running answer, the rest from waiting prompts; a smaller "
          "number gives steadier streams and slower prompts")
      ->capture_default_str();
  serve.add_option("--kv-tokens", s.kv_tokens,
                   "tokens of KV cache for all sequences; 0: as many as --kv-fraction allows");
  serve
      .add_option("--kv-fraction", s.kv_fraction,
                  "fraction of the memory left after loading for the KV cache")
      ->capture_default_str();
  serve.add_option("--simulate-routing", s.simulated_ranks,
                   "for measuring: route as if perfectly balanced over so many ranks; texts are "
                   "meaningless; 0: as the router chooses");
  serve.add_option("--drain", s.drain_seconds, "seconds for running answers to end after SIGTERM")
      ->capture_default_str();
  serve.add_flag("--no-prefix-cache", s.no_prefix_cache,
                 "free the KV cache of a prompt when its answer has ended");
  serve.add_flag("--no-async-output", s.no_async_output,
                 "detokenize between steps instead of concurrently");
  serve.add_flag("--log-requests", s.log_requests,
                 "print a line on standard error for each answer");
}

}  // namespace tandem
