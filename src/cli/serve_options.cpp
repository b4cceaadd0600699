#include "cli/serve_options.h"

namespace tandem {

void add_serve_options(CLI::App& serve, ServeOptions& s) {
  serve.add_option("--host", s.host, "address to listen on; 0.0.0.0: every one of this machine")
      ->capture_default_str();
  serve.add_option("--port", s.port, "port; 0: any that is free")->capture_default_str();
  serve.add_option("--served-model-name", s.served_model_name,
                   "the name clients ask for; without it, MODEL as given");
  serve.add_option("--api-key", s.api_key, "clients must send it: Authorization: Bearer KEY")
      ->envname("TANDEM_API_KEY");
  auto* cert = serve.add_option("--cert", s.certificate,
                                "PEM file of a certificate, and those that signed it: https");
  auto* key = serve.add_option("--key", s.key, "PEM file of the certificate's private key");
  cert->needs(key);
  key->needs(cert);
  serve
      .add_option("--cors-origin", s.cors_origins,
                  "a web page's origin, as https://chat.example, that may read answers, *: any; "
                  "may be repeated")
      ->allow_extra_args(false);
  serve.add_option("--max-batch", s.max_batch, "answers computed at a time; others wait")
      ->capture_default_str();
  serve
      .add_option("--chunk", s.chunk,
                  "tokens of a step: one of every running answer, then of waiting prompts; fewer: "
                  "steadier streams, slower prompts")
      ->capture_default_str();
  serve.add_option("--kv-tokens", s.kv_tokens,
                   "tokens of KV cache for all answers; 0: as --kv-fraction says");
  serve
      .add_option("--kv-fraction", s.kv_fraction,
                  "part of the memory left after loading that the KV cache may take")
      ->capture_default_str();
  serve
      .add_option("--drain", s.drain_seconds,
                  "seconds that running answers have to end after SIGTERM")
      ->capture_default_str();
  serve.add_flag("--no-prefix-cache", s.no_prefix_cache,
                 "forget the keys of a prompt when its answer has ended");
  serve.add_flag("--no-async-output", s.no_async_output,
                 "make text between the steps, not beside them");
  serve.add_flag("--log-requests", s.log_requests, "a line on standard error for each answer");
}

}  // namespace tandem
