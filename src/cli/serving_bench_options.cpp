#include "cli/serving_bench_options.h"

namespace tandem {

void add_serving_bench_options(CLI::App& serving, Options& options) {
  ServingBenchOptions& o = options.serving;
  DatasetOptions& d = o.dataset;
  // Like the original's parser, the last of repeated options wins: scripts append overrides.
  serving.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  serving
      .add_option("--backend", o.backend,
                  "what to send: sglang, sglang-native (/generate), sglang-oai, vllm, lmdeploy "
                  "(/v1/completions), or those three with -chat")
      ->capture_default_str();
  serving.add_option("--base-url", o.base_url, "http://HOST:PORT, instead of --host and --port");
  serving.add_option("--host", o.host, "the server's")->capture_default_str();
  serving.add_option("--port", o.port,
                     "the server's; without it 8000 for vllm, 23333 for lmdeploy, else 30000");
  serving.add_option("--model", o.model, "without it, the first of the server's /v1/models");
  serving.add_option("--tokenizer", o.tokenizer,
                     "model directory; without it, the model's name is taken for one");
  serving.add_option("--dataset-name", d.name, "sharegpt, random or random-ids")
      ->capture_default_str();
  serving.add_option("--dataset-path", d.path, "a ShareGPT file, for sharegpt and random");
  serving.add_option("--num-prompts,--num-prompt", d.n_prompts, "requests")->capture_default_str();
  serving
      .add_option("--random-input-len,--random-input", d.input_tokens, "tokens of a prompt at most")
      ->capture_default_str();
  serving
      .add_option("--random-output-len,--random-output", d.output_tokens,
                  "tokens of an answer at most")
      ->capture_default_str();
  serving
      .add_option("--random-range-ratio", d.range_ratio,
                  "the least as a part of the most; 1: all alike")
      ->capture_default_str();
  serving.add_option("--sharegpt-output-len", d.sharegpt_output_tokens,
                     "tokens of an answer instead of the file's");
  serving.add_option("--sharegpt-context-len", d.sharegpt_context,
                     "leave out conversations longer than that");
  serving.add_option("--prompt-suffix", d.prompt_suffix, "put after each prompt of sharegpt");
  serving.add_flag("--tokenize-prompt", d.sends_ids, "send ids, not text (sglang)");
  serving
      .add_option("--request-rate", o.request_rate,
                  "requests a second, at random times (Poisson); inf: all at once")
      ->default_str("inf");
  serving.add_option("--max-concurrency", o.max_concurrency,
                     "requests under way at most; others wait here");
  serving.add_option("--warmup-requests", o.warmup_requests, "sent before measuring")
      ->capture_default_str();
  serving.add_option("--seed", o.seed, "same seed, same requests")->capture_default_str();
  serving.add_flag("--disable-stream", o.disable_stream, "ask for whole answers");
  serving.add_flag("--return-logprob", o.return_logprob, "ask for log-probabilities (sglang)");
  serving.add_flag("--disable-ignore-eos", o.disable_ignore_eos,
                   "let answers end where the model ends them");
  serving.add_option("--extra-request-body", o.extra_request_body,
                     "JSON object whose fields are added to each request");
  serving.add_flag("--flush-cache", o.flush_cache,
                   "empty the server's prefix cache before measuring");
  serving.add_option("--output-file", o.output_file,
                     "a line of JSON is appended; without it, BACKEND_MMDD_N_IN_OUT.jsonl");
  serving.add_flag("--output-details", o.output_details, "with lists of every request in it");
  serving.add_flag("--disable-tqdm", o.disable_tqdm, "no progress");
  serving.add_option("--plot", o.plot, "draw several runs into this SVG file");
  serving.add_flag("--json", options.json, "reports as lines of JSON on standard output");
  serving.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::Throw);
  serving
      .add_option("--concurrency", o.concurrency,
                  "a run at each of these, four requests a user; then a table")
      ->delimiter(',');
  serving
      .add_option("--slo-tps-user", o.slo_tokens_a_user,
                  "search the highest concurrency that keeps 99 of 100 users at so many tokens a "
                  "second")
      ->delimiter(',');
}

}  // namespace tandem
