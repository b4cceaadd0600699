#include "cli/bench_options.h"

#include <string>

#include "bench/bench_model.h"
#include "cli/serving_bench_options.h"
#include "cli/typed_options.h"
#include "core/check.h"
#include "core/machine_info.h"
#include "loader/loaded_model.h"

namespace tandem {

void add_bench(CLI::App& app, Options& o, Command& command) {
  BenchOptions& b = o.bench;
  CLI::App* bench = app.add_subcommand("bench", "measure this machine and the engine on it");
  bench->require_subcommand(1);
  bench->footer(
      "Examples:\n"
      "  tandem bench machine\n"
      "  tandem bench experts --config r1 --experts fp8 --tokens 1,8,128\n"
      "  tandem bench generate --config r1 --layers 5 --json\n"
      "`tandem bench WHAT --help` tells more.");
  const auto add = [&](const char* name, const char* what, Command function, const char* example) {
    CLI::App* sub = bench->add_subcommand(name, what);
    sub->footer(std::string("Examples:\n") + example);
    sub->callback([&command, function] { command = function; });
    sub->add_option("--threads", o.model.n_threads, "threads, pinned one to a core; 0: all cores")
        ->capture_default_str();
    sub->add_option("--seconds", b.seconds, "time to measure each row")->capture_default_str();
    sub->add_option(
           "--memory", b.memory_gb,
           "GB that weights may take, and what is read to measure; 0: a part of what is free")
        ->capture_default_str();
    sub->add_flag("--json", o.json, "one JSON object a row on standard output");
    return sub;
  };
  const auto add_shapes = [&](CLI::App* sub) {
    sub->add_option("--config", b.config,
                    "shapes of which model: r1, v3, v2, v2-lite, k2, moonlight, .., or a "
                    "config.json or model directory")
        ->capture_default_str();
  };
  const auto add_model = [&](CLI::App* sub) {
    add_shapes(sub);
    add_isa(*sub, o.model.isa, "instruction set: auto, or a name");
  };
  const auto add_rows = [&](CLI::App* sub, const char* tokens) {
    sub->add_option("--tokens", b.tokens, tokens)->delimiter(',');
    sub->add_flag("--csv", b.csv, "comma-separated values on standard output");
    sub->add_option("--plot", b.plot, "draw the rows into this SVG file");
  };
  const auto add_contexts = [&](CLI::App* sub) {
    sub->add_option("--ctx", b.contexts, "tokens in the KV cache, a list")->delimiter(',');
  };
  const auto add_gpu_activations = [&](CLI::App* sub) {
    add_activations(*sub, o.model.fp8_activations,
                    "of products of many tokens on the GPU: bf16, or fp8 with weights in FP8");
  };
  const char* experts_help =
      "format of routed experts: auto (the checkpoint's), fp8, bf16, int8, int4, int4-32, ..";
  const char* format_help = "format of the matrices: auto (the checkpoint's), fp8, bf16, ..";

  CLI::App* machine =
      add("machine", "read bandwidth of memory and disk, peak of every arithmetic instruction",
          bench_machine_command,
          "  tandem bench machine --json | jq .read_bytes_per_second\n"
          "  tandem bench experts --json > rows.json; tandem bench machine --curves rows.json\n");
  machine->add_option("--disk", b.disk,
                      "file or model directory to read; without it, a file that is written for "
                      "that into the cache directory");
  machine->add_option("--curves", b.curves,
                      "rows of `tandem bench experts, mlp, attention --json`: `tandem plan` then "
                      "uses this machine's own efficiencies instead of defaults");

  const char* tokens_help = "tokens in a step, a list";
  CLI::App* embed = add("embed", "rows of the embedding table", bench_embed_command,
                        "  tandem bench embed --config r1 --plot embed.svg\n");
  add_model(embed);
  add_rows(embed, tokens_help);

  CLI::App* experts = add("experts", "a MoE layer's routed experts", bench_experts_command,
                          "  tandem bench experts --config k2 --experts bf16 --tokens 1,32 --json\n"
                          "  tandem bench experts --tokens 64 --skew\n");
  add_model(experts);
  add_rows(experts, tokens_help);
  experts->add_option("--experts", b.experts, experts_help)->capture_default_str();
  experts->add_flag("--skew", b.skew, "also with one expert that takes half of the tokens");

  CLI::App* mlp =
      add("mlp", "dense products and the feed-forward network of a dense layer", bench_mlp_command,
          "  tandem bench mlp --config r1 --format fp8 --tokens 1,512\n");
  add_model(mlp);
  add_rows(mlp, tokens_help);
  mlp->add_option("--format", b.format, format_help)->capture_default_str();
  add_gpu_activations(mlp);

  CLI::App* attention =
      add("attention", "attention over the KV cache, for one token and for a prompt",
          bench_attention_command,
          "  tandem bench attention --ctx 1024,16384\n"
          "  tandem bench attention --variants --ctx 4096\n");
  add_model(attention);
  add_contexts(attention);
  attention->add_flag("--variants", b.variants,
                      "instead, the five orders of computing one token's attention with its "
                      "projections: CD, CC, A_CC, A_CC_ME, AM_CC_ME");
  add_rows(attention, "lengths of prompts that end there, a list");
  attention->add_option("--batch", b.batches, "sequences decoded at a time, a list")
      ->delimiter(',');

  CLI::App* moe =
      add("moe", "a MoE layer's feed-forward part: router, shared experts, routed experts",
          bench_moe_command, "  tandem bench moe --config v2-lite --layers 2 --tokens 1,64\n");
  CLI::App* layer = add("layer", "whole layers, dense and MoE", bench_layer_command,
                        "  tandem bench layer --config r1 --layers 3 --ctx 4096 --tokens 1,512\n");
  for (CLI::App* sub : {moe, layer}) {
    add_model(sub);
    add_rows(sub, tokens_help);
    sub->add_option("--layers", b.layers, "different ones that are walked through")
        ->capture_default_str();
    sub->add_option("--experts", b.experts, experts_help)->capture_default_str();
    sub->add_option("--format", b.format, format_help)->capture_default_str();
    add_gpu_activations(sub);
  }
  add_contexts(layer);

  CLI::App* generate =
      add("generate", "a cut model with random weights, end to end", bench_generate_command,
          "  tandem bench generate --config r1 --layers 5 --experts fp8 --ctx 1024,16384\n");
  add_model(generate);
  add_contexts(generate);
  generate->add_option("--tokens", b.tokens, "lengths of prompts, a list")->delimiter(',');
  generate->add_option("--batch", b.batches, "sequences decoded at a time, a list")->delimiter(',');
  generate->add_option("--layers", b.layers, "the first is dense, the others have experts")
      ->capture_default_str();
  generate->add_option("--experts", b.experts, experts_help)->capture_default_str();
  generate->add_option("--format", b.format, format_help)->capture_default_str();
  add_gpu_activations(generate);
  generate->add_option("-n", b.new_tokens, "tokens to decode at each context")
      ->capture_default_str();

  CLI::App* kernels =
      add("kernels", "small kernels of a GPU beside the bytes that they move",
          bench_kernels_command, "  tandem bench kernels --config r1 --tokens 1,8,512\n");
  add_shapes(kernels);
  kernels->add_option("--tokens", b.tokens, tokens_help)->delimiter(',');

  CLI::App* products =
      add("products", "a GPU's products of many rows, beside cuBLAS where it is installed",
          bench_products_command, "  tandem bench products --config r1 --tokens 512,4096\n");
  add_shapes(products);
  products->add_option("--tokens", b.tokens, "rows of a product, an expert's too, a list")
      ->delimiter(',');
  products->add_option("--format", b.format, format_help)->capture_default_str();

  CLI::App* hybrid =
      add("hybrid", "steps that a GPU and the CPU share, beside what each takes alone",
          bench_hybrid_command,
          "  tandem bench hybrid --config r1 --layers 5 --batch 1,8,32 --ctx 4096\n");
  add_model(hybrid);
  add_contexts(hybrid);
  hybrid->add_option("--tokens", b.tokens, "tokens of steps that bring experts to the GPU, a list")
      ->delimiter(',');
  hybrid->add_option("--batch", b.batches, "sequences decoded at a time, a list")->delimiter(',');
  hybrid->add_option("--layers", b.layers, "the first is dense, the others have experts")
      ->capture_default_str();
  hybrid->add_option("--experts", b.experts, experts_help)->capture_default_str();
  hybrid->add_option("--format", b.format, format_help)->capture_default_str();

  CLI::App* serving = bench->add_subcommand(
      "serving", "a server under load, with the command line and report of sglang.bench_serving");
  serving->footer(
      "Examples:\n"
      "  tandem bench serving --backend lmdeploy --port 8000 --dataset-name random --dataset-path "
      "ShareGPT.json\n"
      "      --random-range-ratio 1 --random-input-len 1024 --random-output-len 1024 "
      "--num-prompts 200\n"
      "  tandem bench serving --backend vllm --dataset-name random-ids --concurrency 1,4,16 --plot "
      "sweep.svg\n"
      "  tandem bench serving --backend vllm --dataset-name random-ids --slo-tps-user 20,10\n");
  serving->callback([&command] { command = bench_serving_command; });
  add_serving_bench_options(*serving, o);
}

void require_list(const char* option, const std::vector<int>& values, int most) {
  for (const int n : values)
    require(n >= 1 && n <= most, "{} {}: must be between 1 and {}", option, n, most);
}

void require_sane(const BenchOptions& b) {
  constexpr int kMaxContext = 1 << 24;
  require(b.seconds > 0 && b.seconds <= 3600, "--seconds {}: must be above 0 and at most 3600",
          b.seconds);
  const double free_gb = static_cast<double>(available_memory_bytes()) * 1e-9;
  require(b.memory_gb >= 0 && b.memory_gb <= free_gb,
          "--memory {}: must be between 0 and the {:.1f} GB that are free", b.memory_gb, free_gb);
  require_list("--tokens", b.tokens, kMaxTokens);
  require_list("--ctx", b.contexts, kMaxContext);
  require_list("--batch", b.batches, kStepTokens);
}

std::vector<int> list_or(const std::vector<int>& given, const std::vector<int>& usual) {
  return given.empty() ? usual : given;
}

}  // namespace tandem
