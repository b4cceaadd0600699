// tandem selftest: checks kernels and GPU of this machine against reference arithmetic.
#include <cstdio>

#include "bench/costs.h"
#include "bench/gpu/gpu_benches.h"
#include "bench/self_test.h"
#include "cli/command_options.h"
#include "cli/typed_options.h"
#include "core/machine_info.h"
#include "model/cost.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kMemoryPart = 0.4;  // of the free memory, for weights

// All instruction sets of this machine but the reference.
std::vector<cpu::KernelTable> fast_kernels() {
  std::vector<cpu::KernelTable> tables;
  for (int isa = static_cast<int>(cpu::Isa::kReference) + 1;
       isa <= static_cast<int>(cpu::best_isa()); ++isa)
    tables.push_back(cpu::kernels_for(static_cast<cpu::Isa>(isa)));
  return tables;
}

// The model with few layers, and as many experts as fit.
ModelConfig reduced(const ModelConfig& config, int n_layers, WeightFormats formats) {
  const ModelConfig c = with_layers(config, n_layers);
  const int64_t budget =
      static_cast<int64_t>(kMemoryPart * static_cast<double>(available_memory_bytes()));
  const int64_t backbone = backbone_bytes(c, formats);
  require(backbone < budget,
          "--layers {}: {:.2f} GB are needed without experts, and {:.2f} GB may be used; choose "
          "fewer layers or another --arch",
          n_layers, gigabytes(backbone), gigabytes(budget));
  return with_resident_experts(c, formats.experts, budget - backbone);
}

Json json_of(const std::string& model, const ModelConfig& config, WeightFormat experts,
             const SelfTestRow& row) {
  return {{"model", model},
          {"layers", config.n_layers},
          {"resident_experts", config.router.n_experts},
          {"experts", format_name(experts)},
          {"device", row.device},
          {"isa", row.kernels},
          {"logits", {row.n_rows, row.vocab}},
          {"finite", row.finite},
          {"error", row.error},
          {"bound", row.bound},
          {"seconds", row.seconds},
          {"passed", row.passed()}};
}

void print_header() {
  std::printf("%-12s %-9s %-7s %-11s %-15s %9s %7s %8s\n", "model", "experts", "device", "kernels",
              "logits", "error", "bound", "seconds");
}

void print_row(const std::string& model, WeightFormat experts, const SelfTestRow& row) {
  std::printf("%-12s %-9s %-7s %-11s %-15s %9.5f %7.2f %8.2f  %s\n", model.c_str(),
              format_name(experts).c_str(), row.device.c_str(), row.kernels.c_str(),
              fmt::format("[{}, {}]", row.n_rows, row.vocab).c_str(), row.error, row.bound,
              row.seconds,
              row.passed()  ? "passed"
              : !row.finite ? "FAILED: not finite"
                            : "FAILED: beyond the bound");
}

int selftest_command(const Options& options) {
  const SelfTestOptions& o = options.self_test;
  check_layers(o.layers);
  std::vector<ModelConfig> configs;
  for (const std::string& model : o.models) configs.push_back(bench_config(model, "--arch"));
  const std::vector<cpu::KernelTable> kernels = fast_kernels();
  const GpuBenchModels gpus = gpu_bench_models();
  Team team(o.n_threads);
  int n_rows = 0, n_failed = 0;
  if (!o.json) print_header();
  for (size_t i = 0; i < configs.size(); ++i)
    for (const WeightFormat experts :
         {stored_expert_format(configs[i]), weight_format("int8"), weight_format("int4")}) {
      if (experts.group > 0 && configs[i].expert_dim % experts.group != 0) continue;
      const WeightFormats formats = {stored_format(configs[i]), experts};
      const ModelConfig config = reduced(configs[i], o.layers, formats);
      self_test({config, formats, kernels, gpus}, team, [&](const SelfTestRow& row) {
        ++n_rows;
        n_failed += row.passed() ? 0 : 1;
        if (o.json)
          std::puts(json_of(o.models[i], config, experts, row).dump().c_str());
        else
          print_row(o.models[i], experts, row);
        std::fflush(stdout);
      });
    }
  if (!o.json && !gpus)
    std::puts("no GPU was tested: there is none, or this program is built without CUDA");
  if (!o.json) std::printf("%d passed, %d failed\n", n_rows - n_failed, n_failed);
  return n_failed > 0 ? 1 : 0;
}

}  // namespace

void add_selftest(CLI::App& app, Options& options, Command& command) {
  SelfTestOptions& o = options.self_test;
  CLI::App* selftest = app.add_subcommand(
      "selftest", "check this machine's kernels and GPU against reference arithmetic");
  selftest->footer(
      "Computes the logits of two prompts with random weights in the shapes of a released model,\n"
      "by every instruction set and the GPU, and compares them with those of plain float32 code.\n"
      "Exit status 1 if a difference is beyond its bound.\n"
      "Examples:\n"
      "  tandem selftest\n"
      "  tandem selftest --arch r1,k2 --layers 3\n"
      "  tandem selftest --json | jq .error");
  selftest->callback([&command] { command = selftest_command; });
  selftest
      ->add_option(
          "--arch", o.models,
          "models whose shapes are computed, a list: v2-lite, v2, v3, r1, k2, moonlight, ..")
      ->delimiter(',')
      ->capture_default_str();
  add_value(*selftest, "--layers", o.layers,
            "number of layers: the first is dense, the others have experts");
  add_threads(*selftest, o.n_threads);
  selftest->add_flag("--json", o.json, "print one JSON object per row");
}

}  // namespace tandem
