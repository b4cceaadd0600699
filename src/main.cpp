// The command line of tandem. Exit status: 0 success, 1 failure while running, 2 invalid user
// input.
#include <signal.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <thread>

#include "bench/machine/this_machine.h"
#include "cli/command_options.h"
#include "cli/console.h"
#include "cli/options.h"
#include "cli/plan/planned_ranks.h"
#include "cli/ranks.h"
#include "cli/typed_options.h"
#include "comm/agreement.h"
#include "comm/launcher.h"
#include "core/run_error.h"
#include "io/json.h"

namespace tandem {
namespace {

void add_model_options(CLI::App& command, Options& o) {
  command.add_option("MODEL", o.model.directory,
                     "Hugging Face model directory; without it, the embedded tiny-r1");
  add_device(command, o.model.device,
             "device: cpu; cuda (an NVIDIA GPU, with the experts that do not fit or are placed on "
             "the CPU there); or auto (a GPU if there is one)");
  add_threads(command, o.model.n_threads);
  add_isa(command, o.model.isa,
          "instruction set: auto, reference (float32 throughout, slow), avx2, avx512 or amx; "
          "the environment variable TANDEM_ISA does the same");
  add_format(command, "--experts", o.model.experts,
             "format of routed experts in memory: auto (as stored, or int8 or int4 where "
             "memory is too small), fp8, bf16, int8, int4, int4-32 or int4-128");
  add_attention(command, o.model.attention,
                "auto, naive (keys and values restored) or absorb (in latent space)");
  add_dense_products(command, o.model.dense_products,
                     "what computes dense products of BF16 and float32 weights on the CPU: tandem, "
                     "onednn (where it is installed), or fastest, as measured at load for each "
                     "shape; with oneDNN an answer may depend on other requests");
  add_value(command, "--ctx", o.model.context,
            "tokens of KV cache; 0: the model's own context, at most 8192");
  add_kv_type(command, o.model.kv,
              "type of the KV cache: auto, bf16, or fp8 (with --device cuda), which holds 1.75 "
              "times as many tokens at some loss of accuracy");
  add_activations(command, o.model.fp8_activations,
                  "type of activations in products of many tokens on a GPU: bf16, or fp8, which "
                  "with FP8 weights is twice as fast on compute capability 8.9 and 12.0, at some "
                  "loss of accuracy");
  command.add_option("--placement", o.model.placement,
                     "placement file written by `tandem plan --out`; one with workers needs "
                     "--workers too");
  command.add_option("--cache", o.model.cache,
                     "folder of the packed cache; without it, $XDG_CACHE_HOME/tandem or "
                     "~/.cache/tandem is read, and only `tandem pack` writes there");
  command.add_flag("--json", o.json, "print the report as one JSON object on standard output");
  command.add_flag("-q,--quiet", o.quiet, "print no progress and no timings");
}

void add_generate_options(CLI::App& command, Options& o) {
  GenerateOptions& g = o.generate;
  SamplingParams& s = g.sampling;
  add_value(command, "-n", g.max_new_tokens, "maximum number of new tokens");
  command.add_option("--system", g.system, "system prompt");
  add_value(command, "--temp", s.temperature, "temperature; 0: greedy");
  add_value(command, "--top-p", s.top_p,
            "sample from the most likely tokens up to this total probability");
  add_value(command, "--top-k", s.top_k, "sample from this many most likely tokens; 0: all");
  add_value(command, "--min-p", s.min_p,
            "drop tokens less likely than this fraction of the most likely");
  add_value(command, "--repetition-penalty", s.repetition_penalty,
            "above 1: tokens that occurred before become less likely");
  add_value(command, "--presence-penalty", s.presence_penalty,
            "subtracted from the logits of tokens generated before");
  add_value(command, "--frequency-penalty", s.frequency_penalty,
            "subtracted once per earlier occurrence of the token");
  command
      .add_option("--logit-bias", g.logit_bias,
                  "ID=VALUE: value added to the logit of a token; may be repeated")
      ->allow_extra_args(false);  // MODEL may follow
  add_value(command, "--seed", s.seed, "the same seed gives the same text");
  command.add_flag("--ignore-eos", g.ignore_eos, "continue after the end of the answer");
  command.add_option("--stop", g.stops, "end the answer before this text; may be repeated")
      ->allow_extra_args(false);
  add_draft(command, o.model.draft, o.model.draft_tokens);
}

void add_plan(CLI::App& app, Options& o, Command& command) {
  PlanOptions& p = o.plan;
  CLI::App* plan = app.add_subcommand(
      "plan", "where every part of a model would live, how fast it would be, and why");
  plan->footer(
      "Examples:\n"
      "  tandem plan r1 --machine 2x6454s-4090 --ctx 32768\n"
      "  tandem plan kimi-k2 --machine 12x8xh100 --objective throughput --concurrency 0 "
      "--user-speed 20\n"
      "  tandem plan r1 --machine 8xh200 --out placement.json\n"
      "  tandem plan r1 --machine 8xh200 --placement placement.json   as edited\n"
      "  tandem plan ./DeepSeek-R1 --machine mine.json --json --plot plan.svg");
  plan->callback([&command] { command = plan_command; });
  plan->add_option("MODEL", p.model,
                   "v2-lite, v2, v3, r1, kimi-k2, moonlight, a config.json or a model directory; "
                   "without it, the embedded tiny-r1");
  plan->add_option("--machine", p.machine,
                   "a machine of machines/ by name, or a machine file; without it, this machine as "
                   "measured by `tandem bench machine`");
  add_value(*plan, "--ctx", p.context, "tokens of KV cache per sequence");
  add_value(*plan, "--concurrency", p.concurrency,
            "concurrent sequences; 0: the number that serves the objective best");
  add_value(*plan, "--prompt", p.prompt_tokens, "tokens of a prompt");
  add_value(*plan, "--output", p.output_tokens, "tokens of an answer");
  add_objective(*plan, p.objective, "latency of a request, or throughput of all");
  add_value(*plan, "--user-speed,--slo-tps-user", p.user_speed,
            "required tokens per second for each user; 0: any");
  add_value(*plan, "--slo-ttft", p.first_token_seconds,
            "most seconds until the first token of a request; 0: any");
  plan->add_option("--preset", p.preset,
                   "isl1k-osl1k: prompts and answers of 1,000 tokens, and a table for 8, 64 and "
                   "2,048 sequences; sets --prompt, --output, --ctx and --concurrency");
  add_format(*plan, "--experts", p.experts,
             "format of routed experts: auto (as stored, or the widest that fits), fp8, "
             "bf16, int8, int4, int4-32 or int4-128");
  add_kv_type(*plan, p.kv,
              "type of the KV cache: auto (bf16, or fp8 where only that lets GPUs compute "
              "attention), bf16 or fp8");
  plan->add_option("--redundant", p.redundant_experts,
                   "replicas of a layer's most used experts, beyond one of each, where experts are "
                   "assigned to several GPUs or hosts; without it, 0 or about 32 on GPUs");
  add_expert_rows(*plan, p.expert_rows);
  plan->add_flag("--experts-move", p.experts_move,
                 "keep memory for experts that move while a server answers (serve --rebalance, "
                 "--hot-experts live)");
  plan->add_option("--draft-tokens", p.draft_tokens,
                   "drafts of a sequence per step whose effect is predicted; 0: none; without it, "
                   "the best of 0 to 4");
  add_value(*plan, "--acceptance", p.acceptance,
            "probability that a draft is accepted if all drafts before it were");
  plan->add_option(
      "--statistics", p.statistics,
      "JSON file of expert frequencies (run --record-routing): the most frequent go to GPUs");
  plan->add_option("--placement", p.placement, "predict the speed of the placement in this file");
  plan->add_option("--out", p.out,
                   "write the placement to this file, which the commands for workers then name");
  plan->add_option("--plot", p.plot, "draw memory and a layer's time into this SVG file");
  plan->add_flag("--batch-table", p.batch_table,
                 "tokens per expert, arithmetic intensity and what takes the time, for steps of 1 "
                 "to 65,536 sequences");
  plan->add_flag("--simulate", p.simulate,
                 "simulate four MoE layers of an expert-parallel plan event by event, with and "
                 "without expert load balancing and overlap of two micro-batches");
  add_value(
      *plan, "--skew", p.skew,
      "skew of the simulated routing: the n-th expert has probability proportional to n^-skew");
  add_value(*plan, "--faults", p.faults.n_faults,
            "simulate decoding while workers fail so many times and come back; 0: do not");
  add_value(*plan, "--fault-interval", p.faults.mean_interval_seconds,
            "seconds between two faults of --faults, on average");
  add_value(*plan, "--standbys", p.n_standbys,
            "hosts that get no experts and load those of a worker that is lost");
  plan->add_flag(
      "--servers", p.servers,
      "compare servers that compute prompts and answers with separate prefill and decode "
      "servers, for requests that arrive at random");
  add_value(*plan, "--request-rate", p.requests_per_second,
            "requests a second to --servers; 0: as many as keep --concurrency of them on the way");
  add_value(*plan, "--slo-gap", p.gap_seconds,
            "maximum seconds between two tokens of an answer of --servers, for 99 of 100; 0: any");
  plan->add_flag("--json", o.json, "print the report as one JSON object on standard output");
  plan->add_flag("-q,--quiet", o.quiet, "do not print the age of this machine's measurement");
}

void add_pull(CLI::App& app, Options& o, Command& command) {
  PullCommandOptions& p = o.pull;
  CLI::App* pull = app.add_subcommand("pull", "fetch a checkpoint from a hub, and check it");
  pull->footer(
      "The environment variable HF_ENDPOINT names the hub (https://huggingface.co), HF_TOKEN a\n"
      "token for repositories that ask for one. A call that was interrupted goes on where it was;\n"
      "files get their names when all are whole and have the digests that the hub lists.\n"
      "Examples:\n"
      "  tandem pull deepseek-ai/DeepSeek-R1 --dir /data/DeepSeek-R1\n"
      "  HF_ENDPOINT=https://hf-mirror.com tandem pull deepseek-ai/DeepSeek-V2-Lite-Chat\n"
      "  tandem pull moonshotai/Moonlight-16B-A3B-Instruct --include 'config.json' "
      "'tokenizer*'");
  pull->callback([&command] { command = pull_command; });
  pull->add_option("REPOSITORY", p.repository, "OWNER/NAME on the hub")->required();
  pull->add_option("--dir", p.directory,
                   "folder for the files; without it, the repository's name in this folder");
  add_value(*pull, "--revision", p.revision, "branch, tag or commit");
  pull->add_option("--include", p.include,
                   "patterns of the files to fetch; without it, weights, configuration, tokenizer "
                   "and licence");
  add_value(*pull, "--connections", p.n_connections, "ranges that are fetched at the same time");
  add_value(*pull, "--idle", p.idle_seconds,
            "a connection that receives nothing for so many seconds is opened again");
  add_value(*pull, "--tries", p.n_tries,
            "failures in a row, with longer and longer waits between, before giving up");
  pull->add_flag("--json", o.json, "print the report as one JSON object on standard output");
  pull->add_flag("-q,--quiet", o.quiet, "print no progress and no files");
}

// Whether a benchmark of several ranks was chosen.
bool measures_ranks(const Options& o) { return o.benchmark && o.benchmark->on_ranks; }

// The commands that several ranks can run together.
bool runs_on_ranks(Command command, const Options& o) {
  return command == run_command || command == chat_command || command == serve_command ||
         command == eval_command || command == logits_command || measures_ranks(o);
}

// The plan for --ranks on this machine. Nothing where the command line says how ranks divide the
// model, or where the machine was not measured or gives ranks unequal parts: then they divide each
// layer.
std::optional<PlannedPlacement> planned_ranks(const Options& o, Command command) {
  const bool answers =
      command == run_command || command == chat_command || command == serve_command;
  if (!o.n_ranks || !answers || !leaves_ranks_to_a_plan(o.model)) return {};
  const std::optional<Machine> machine = saved_this_machine();
  if (!machine) return {};
  const std::optional<Machine> of_ranks = machine_of_ranks(*machine, o.model.device, *o.n_ranks);
  if (!of_ranks) return {};
  std::string why_not;
  auto planned = plan_for_ranks(o, *of_ranks, *o.n_ranks, command == serve_command, why_not);
  if (o.quiet || o.json) return planned;
  if (!planned) {
    fmt::print(stderr, "--ranks {}: they divide each layer, as there is no plan: {}\n", *o.n_ranks,
               why_not);
    return {};
  }
  const Stage& stage = planned->placement.stages[0];
  fmt::print(stderr,
             "--ranks {}: as planned, {} pipeline stage(s) of {} replica(s) x {}-way tensor "
             "parallel, {:.1f} tokens/s predicted\n",
             *o.n_ranks, planned->placement.stages.size(), stage.dp(), stage.tp,
             planned->prediction.decode.tokens_per_second);
  return planned;
}

// Starts the ranks that asked_ranks() names; returns their exit status, or nothing
// where this process goes on. What no rank could run is refused before.
std::optional<int> start_ranks(const Options& o, Command command, const CommandRanks& ranks,
                               int argc, char** argv) {
  const AskedRanks asked = asked_ranks(o.n_ranks, o.model, ranks.launched());
  if (asked.n > 1) require_runs_on_ranks(o.model);
  std::optional<RanksOfHost> to_start = ranks.to_start(asked, argc, argv);
  if (!to_start) return {};
  if (!o.n_ranks && !o.quiet && !o.json)
    fmt::print(stderr, "{}: starting its {} ranks on this host\n", asked.by, asked.n);
  std::optional<PlacementFile> file;
  if (const auto planned = planned_ranks(o, command)) {
    file.emplace(planned->placement);
    to_start->command.insert(to_start->command.end(), {"--placement", file->path()});
  }
  const EndOfRanks end = run_ranks(*to_start);
  if (!end.error.empty()) fmt::print(stderr, "error: {}\n", end.error);
  return end.status;
}

int dispatch(int argc, char** argv, CommandRanks& ranks) {
  Options o;
  Command command = nullptr;
  CLI::App app{"tandem runs DeepSeek-R1/V3 and its family on your machine."};
  app.require_subcommand(1);
  app.formatter(help_without_hidden());  // subcommands take it
  app.footer(
      "Examples:\n"
      "  tandem run -p \"What is 478 + 356?\"          the embedded model thinks and answers\n"
      "  tandem run ./DeepSeek-R1 -f question.txt    a checkpoint as it is on Hugging Face\n"
      "  tandem chat ./DeepSeek-V2-Lite-Chat\n"
      "  tandem serve ./DeepSeek-R1 --port 8000      OpenAI-compatible\n"
      "  tandem route --backends http://a:8000,http://b:8000   in front of several servers\n"
      "  tandem inspect ./DeepSeek-R1\n"
      "  tandem plan r1 --machine 2x6454s-4090       does it fit that machine, and how fast is it\n"
      "See `tandem COMMAND --help` for the options of a command.");
  const auto add = [&](const char* name, const char* what, Command function, const char* examples) {
    CLI::App* sub = app.add_subcommand(name, what);
    sub->footer(std::string("Examples:\n") + examples);
    sub->callback([&command, &o, function] {
      command = function;
      if (o.model.directory.empty()) o.model.directory = embedded_model();
      require_folder(o.model.directory);
    });
    add_model_options(*sub, o);
    return sub;
  };

  CLI::App* run =
      add("run", "generate once; text goes to standard output as it is generated", run_command,
          "  tandem run -p \"What is 12 * 7?\" --temp 0\n"
          "  echo \"Why is the sky blue?\" | tandem run ./DeepSeek-R1 -f -\n"
          "  tandem run ./DeepSeek-V3-Base --raw -p \"Once upon a time\" -n 100 --seed 7\n"
          "  tandem run -p \"What is 2 + 2?\" --json | jq .decode_tokens_per_second");
  run->add_option("-p,--prompt", o.generate.prompt, "the prompt");
  run->add_option("-f,--file", o.generate.prompt_file,
                  "a file with the prompt; - is standard input");
  run->add_flag("--raw", o.generate.raw, "use the prompt as it is, without chat template");
  run->add_option_function<int>(
      "--logprobs",
      [&o](int n) {
        require(n >= 0, "--logprobs {}: must be 0 or more", n);
        o.generate.sampling.n_top_logprobs = n;
      },
      "with --json: log-probabilities of each token and of this many most likely ones");
  run->add_option("--record-routing", o.record_routing,
                  "write how often each expert was chosen, for `tandem plan --statistics`");
  run->add_option(
      "--timeline", o.timeline,
      "write a timeline for a Chrome trace viewer: of GPU and CPU (--device cuda), or of "
      "all ranks that exchange rows (--dp)");
  add_generate_options(*run, o);
  add_workers(*run, o.model.workers);
  add_workers_file(*run, o.model.workers);
  add_ranks(*run, o.n_ranks, o.model);

  CLI::App* chat =
      add("chat", "chat in the terminal; Ctrl-C stops an answer, Ctrl-D quits", chat_command,
          "  tandem chat\n  tandem chat ./DeepSeek-R1 --ctx 32768 --system \"Answer briefly.\"");
  add_generate_options(*chat, o);
  add_workers(*chat, o.model.workers);
  add_workers_file(*chat, o.model.workers);
  add_ranks(*chat, o.n_ranks, o.model);

  CLI::App* serve = add(
      "serve", "OpenAI-compatible HTTP server", serve_command,
      "  tandem serve                                     the embedded model on port 8000\n"
      "  tandem serve ./DeepSeek-R1 --host 0.0.0.0 --ctx 32768 --api-key SECRET\n"
      "  tandem serve ./DeepSeek-R1 --max-batch 64 --chunk 256 --kv-tokens 200000\n"
      "  curl localhost:8000/v1/chat/completions -d '{\"messages\": [{\"role\": \"user\", "
      "\"content\": \"What is 2 + 2?\"}]}'\n"
      "`--ctx` limits the tokens of a prompt with its answer. An answer does not depend on other\n"
      "requests unless --attention auto is given, which is faster on long prompts.");
  add_serve_options(*serve, o.serve);
  add_simulated_routing(*serve, o.model.simulated_routing);
  add_draft(*serve, o.model.draft, o.model.draft_tokens);
  add_workers(*serve, o.model.workers);
  add_workers_file(*serve, o.model.workers);
  add_ranks(*serve, o.n_ranks, o.model);

  CLI::App* inspect =
      add("inspect", "configuration, parameters and bytes by class; reads no weight data",
          inspect_command,
          "  tandem inspect ./DeepSeek-R1\n  tandem inspect ./DeepSeek-R1 --json | jq .parameters");
  inspect->add_flag("--tensors", o.list_tensors, "list every tensor");

  CLI::App* tokenize =
      add("tokenize", "text to token ids as a JSON array", tokenize_command,
          "  tandem tokenize ./DeepSeek-R1 -p \"Hello world\"\n"
          "  tandem tokenize ./DeepSeek-R1 --decode -p \"[19923, 2058]\"\n"
          "  tandem tokenize --chat -p '[{\"role\":\"user\",\"content\":\"Hello\"}]'");
  tokenize->add_option("-p,--prompt", o.generate.prompt, "the text");
  tokenize->add_option("-f,--file", o.generate.prompt_file,
                       "a file with the text; - is standard input");
  tokenize->add_flag("--decode", o.decode, "the inverse: a JSON array of ids to text");
  tokenize->add_flag("--chat", o.chat,
                     "the text is a JSON list of messages: apply the chat template first");

  CLI::App* logits =
      add("logits", "logits of given tokens, as a .npy file", logits_command,
          "  tandem logits ./DeepSeek-V2-Lite --tokens 100000,17464,1843 --out logits.npy\n"
          "  tandem logits ./DeepSeek-V2-Lite --tokens @ids.json --all --out logits.npy --isa "
          "reference");
  logits->add_option("--tokens", o.text, "ids separated by commas, or @FILE with a JSON array")
      ->required();
  logits->add_option("--out", o.out, "the .npy file: float32 [vocab], or [n, vocab] with --all")
      ->required();
  add_workers(*logits, o.model.workers);
  add_ranks(*logits, o.n_ranks, o.model);
  logits->add_flag("--all", o.all, "logits of every position, not only of the last");

  CLI::App* eval =
      add("eval", "perplexity of a text, or the divergence of two models on it", eval_command,
          "  tandem eval ./DeepSeek-V2-Lite -f wiki.txt --ctx 2048\n"
          "  tandem eval ./R1-fp8 -f wiki.txt --against ./R1-bf16\n"
          "  tandem eval ./DeepSeek-R1 -f wiki.txt --against-experts int4");
  eval->add_option("-f,--file", o.file, "the text; - is standard input")->required();
  add_workers(*eval, o.model.workers);
  add_ranks(*eval, o.n_ranks, o.model);
  eval->add_option("--against", o.against,
                   "a second model, for mean KL divergence and top-1 agreement");
  const CLI::Option* against_experts =
      add_format(*eval, "--against-experts", o.against_experts,
                 "the same model with its routed experts in this format; auto: as stored")
          ->default_str("");

  add("pack", "write the packed cache, which the next start only reads", pack_command,
      "  tandem pack ./DeepSeek-R1\n"
      "  tandem pack ./DeepSeek-R1 --cache /fast-disk/tandem\n"
      "  tandem run ./DeepSeek-R1 --cache /fast-disk/tandem -p \"Why is the sky blue?\"");
  add_worker(app, o, command);
  add_plan(app, o, command);
  add_bench(app, o, command);
  add_pull(app, o, command);
  add_route(app, o, command);
  add_selftest(app, o, command);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help
    fail("{}; see tandem --help", e.what());
  }
  o.compares_experts = against_experts->count() > 0;
  if (serve->parsed() && serve->count("--attention") == 0)
    o.model.attention = AttentionForm::kAbsorbed;
  if (!o.model.cache.empty()) o.model.cache_use = CacheUse::kWrite;
  o.model.write_progress = load_progress(o.quiet || o.json, "writing");
  require(ranks.alone() || runs_on_ranks(command, o),
          "only run, chat, serve, eval, logits, bench comm and bench overlap run on several ranks: "
          "start {} without the launcher",
          app.get_subcommands().front()->get_name());
  if (const std::optional<int> status = start_ranks(o, command, ranks, argc, argv)) return *status;
  o.model.ranks = ranks.open(argc, argv);
  if (!ranks.reports()) o.quiet = true;
  if (ranks.reports())
    o.model.warn = [](const std::string& line) { fmt::print(stderr, "warning: {}\n", line); };
  if (!o.quiet && !o.json)
    o.model.note = [](const std::string& line) { fmt::print(stderr, "{}\n", line); };
  signal(SIGXFSZ, SIG_IGN);  // exceeding the file size limit is an error like a full disk
  if (!measures_ranks(o)) return ranks.run([&] { return command(o); });
  std::unique_ptr<RawCollectives> raw;
  std::optional<BenchRanks> bench_ranks;
  if (o.model.ranks.group) {
    raw = ranks.raw_collectives();
    bench_ranks.emplace(BenchRanks{*o.model.ranks.group, *raw, o.model.ranks});
    o.bench.ranks = &*bench_ranks;
  }
  return ranks.run_alike([&] { return command(o); });
}

// The status of the process, after an error as after success.
int status_of(int argc, char** argv) {
  std::optional<CommandRanks> ranks;
  try {
    ranks.emplace();
    return dispatch(argc, argv, *ranks);
  } catch (const AgreedError& e) {
    if (e.reported_here) std::fprintf(stderr, "error: %s\n", e.what());
    return e.while_running ? 1 : 2;
  } catch (const GroupError& e) {  // MPI's own end would wait for the rank
    std::fprintf(stderr, "error: %s\n", e.what());
    end_rank(1);
  } catch (const RunError& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
  } catch (const Error& e) {
    if (!ranks || ranks->reports())
      std::fprintf(stderr, "error: %s\n", e.what());
    else  // a launcher ends all ranks when this one ends, perhaps before rank 0 has reported
      std::this_thread::sleep_for(std::chrono::seconds(2));
    return 2;
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "error: %s\n", kNoMemoryLeft);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
  }
  return 1;
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  // In containers without /sys hwloc prints errors on standard error, but still finds the cores.
  setenv("HWLOC_HIDE_ERRORS", "2", 0);
  const int status = tandem::status_of(argc, argv);
  tandem::announce_end(status);
  return status;
}
