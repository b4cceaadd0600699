// tandem plan: placement of a model on a machine, predicted speed, and reasons.
#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "bench/bench_model.h"
#include "bench/machine/this_machine.h"
#include "cli/options.h"
#include "cli/plan/plan_report.h"
#include "core/clock.h"
#include "core/program_files.h"
#include "io/atomic_file.h"
#include "io/json.h"
#include "io/machine_json.h"
#include "offload/parts/executed_parts.h"
#include "offload/parts/placed_workers.h"
#include "offload/plan/placement_json.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

// A model directory, a config.json, or a name in models/configs.
ModelConfig model_called(const std::string& name) {
  std::error_code ignored;
  if (fs::is_directory(name, ignored)) return ModelConfig::from_directory(name);
  const std::string folder = program_file("models/configs");
  const std::string known = name == "kimi-k2" ? "k2" : name;
  require(fs::exists(name, ignored) || fs::exists(folder + "/" + known + ".json", ignored),
          "{} does not exist, and it is none of {}", name,
          names_of_program_files("models/configs"));
  return bench_config(known);
}

Machine measured_machine(bool quiet) {
  if (auto saved = saved_this_machine()) {
    if (!quiet)
      fmt::print(stderr, "this machine as measured {} (tandem bench machine measures again)\n",
                 age_in_words(std::max<int64_t>(0, seconds_since_1970() - saved->measured_at)));
    return *saved;
  }
  if (!quiet) fmt::print(stderr, "measuring this machine, about 10 s\n");
  nlohmann::ordered_json report = measure_this_machine({});
  save_this_machine(report);
  return machine_from_json(report.dump(), "this machine");
}

// A file, a name in machines/, or this machine.
Machine machine_called(const std::string& name, bool quiet) {
  if (name.empty()) return measured_machine(quiet);
  std::error_code ignored;
  const std::string folder = program_file("machines");
  const std::string known = folder + "/" + name + ".json";
  if (name.find('/') == std::string::npos && fs::exists(known, ignored))
    return machine_from_file(known);
  require(fs::exists(name, ignored), "--machine {} does not exist, and it is none of {}", name,
          names_of_program_files("machines"));
  return machine_from_file(name);
}

// The table of a preset: one plan for each concurrency.
int plan_preset(const Options& o, PlanRequest request) {
  const PlanOptions& p = o.plan;
  const WorkloadPreset& preset = workload_preset(p.preset);
  require(p.placement.empty() && p.out.empty() && p.plot.empty() && !p.batch_table && !p.simulate &&
              p.faults.n_faults == 0 && p.n_standbys == 0 && !p.servers,
          "--preset {}: plans several placements, so --placement, --out, --plot, --batch-table, "
          "--simulate, --faults, --standbys and --servers need a --concurrency of your own instead",
          p.preset);
  request.workload.prompt_tokens = preset.input_tokens;
  request.workload.output_tokens = preset.output_tokens;
  request.workload.context = preset.input_tokens + preset.output_tokens;
  std::vector<Plan> plans;
  for (const int concurrency : preset.concurrency) {
    request.workload.concurrency = concurrency;
    plans.push_back(tandem::plan(request));
  }
  if (o.json) {
    const nlohmann::ordered_json report = {{"model", request.model_name},
                                           {"machine", request.machine.name},
                                           {"preset", p.preset},
                                           {"plans", preset_report(plans)}};
    std::puts(report.dump().c_str());
  } else {
    fmt::print("{} on {}, prompts of {} tokens, answers of {}\n{}", request.model_name,
               request.machine.name, preset.input_tokens, preset.output_tokens, preset_text(plans));
  }
  return 0;
}

}  // namespace

int plan_command(const Options& o) {
  const PlanOptions& p = o.plan;
  const std::string model = p.model.empty() ? embedded_model() : p.model;
  const ModelConfig config = model_called(model);
  const Machine machine = machine_called(p.machine, o.quiet || o.json);
  const Workload workload = {.context = p.context,
                             .concurrency = p.concurrency,
                             .prompt_tokens = p.prompt_tokens,
                             .output_tokens = p.output_tokens,
                             .objective = p.objective,
                             .tokens_per_second_per_user = p.user_speed,
                             .first_token_seconds = p.first_token_seconds,
                             .experts = p.experts,
                             .kv = p.kv,
                             .redundant_experts = p.redundant_experts,
                             .expert_rows = p.expert_rows.value_or(ExpertRows::kExact),
                             .experts_move = p.experts_move,
                             .draft_tokens = p.draft_tokens,
                             .acceptance = p.acceptance};
  const RoutingStatistics routing =
      p.statistics.empty()
          ? RoutingStatistics(config)
          : RoutingStatistics(config, read_text_file(p.statistics, kMaxStatisticsBytes),
                              p.statistics);
  if (!p.preset.empty()) return plan_preset(o, {model, config, machine, workload, routing});
  require(p.placement.empty() || !p.expert_rows,
          "both --placement and --ep-rows: {} says how rows travel (ep_rows): leave one out",
          p.placement);
  require(p.servers || (p.requests_per_second == 0 && p.gap_seconds == 0),
          "--request-rate {:g}, --slo-gap {:g}: these are for --servers: add it, or leave them out",
          p.requests_per_second, p.gap_seconds);
  const PlanRequest request = {
      model,
      config,
      machine,
      workload,
      routing,
      p.n_standbys,
      p.out.empty() ? p.placement : p.out,
      [&](const Placement& placement) { return why_not_executed(config, machine, placement); }};
  require(!p.servers || p.n_standbys == 0,
          "--standbys {}: no server of --servers has workers: leave one out", p.n_standbys);
  require(!p.batch_table || config.router.n_experts > 0, "--batch-table: {} has no experts", model);
  const Plan plan = p.placement.empty() ? tandem::plan(request)
                                        : assess(request, placement_from_file(p.placement));
  const std::vector<Change> changes = possible_changes(request, plan);
  if (!p.out.empty()) write_new_file(p.out, placement_file(plan).dump(2) + "\n");
  if (!p.plot.empty()) write_new_file(p.plot, plan_plot(request, plan));
  nlohmann::ordered_json report;
  std::string text;
  if (o.json)
    report = plan_report(request, plan, changes);
  else
    text = plan_text(request, plan, changes);
  if (p.batch_table) {
    const BatchTable table = batch_table({config, machine, plan.workload, routing}, plan.placement);
    if (o.json)
      report["batch_table"] = batch_table_report(table);
    else
      text += "\n" + batch_table_text(table);
  }
  if (p.simulate) {
    const SimulatedCluster cluster =
        cluster_of({config, machine, plan.workload, routing}, plan.placement, p.skew);
    const std::vector<SimulatedVariant> variants = simulate_variants(cluster);
    if (o.json)
      report["simulation"] = simulation_report(variants);
    else
      text += "\n" + simulation_text(cluster, variants);
  }
  if (p.faults.n_faults != 0) {
    FaultOptions faults = p.faults;
    faults.standbys = plan.standbys;
    const FaultRun run =
        simulate_faults({config, machine, plan.workload, routing}, plan.placement, faults);
    if (o.json)
      report["faults"] = faults_report(run);
    else
      text += "\n" + faults_text(run);
  }
  if (p.servers) {
    const ServerGoal goal = {.requests_per_second = p.requests_per_second,
                             .concurrency = p.concurrency,
                             .first_token_seconds = p.first_token_seconds,
                             .gap_seconds = p.gap_seconds,
                             .tokens_per_second_per_user = p.user_speed};
    const ServerPlan servers = plan_servers(request, plan, goal);
    if (o.json)
      report["servers"] = servers_report(servers);
    else
      text += "\n" + servers_text(servers);
  }
  std::fputs(o.json ? (report.dump() + "\n").c_str() : text.c_str(), stdout);
  return 0;
}

}  // namespace tandem
