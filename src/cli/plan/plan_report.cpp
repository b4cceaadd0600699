#include "cli/plan/plan_report.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "core/memory.h"
#include "io/machine_json.h"
#include "offload/plan/placement_json.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

Json layer_report(const LayerTime& layer);
Json phase_report(const Phase& phase);
Json drafts_report(const DraftPlan& drafts);
Json change_report(const Change& change);
std::string memory_table(const Prediction& p);
std::string parts_table(const Prediction& p);
std::string changes_text(const Plan& plan, const std::vector<Change>& changes);

// Tokens of answers per second and GPU that the placement uses; null without GPUs.
Json per_gpu(const Prediction& p) {
  const int n = p.gpus_used();
  return n > 0 ? Json(p.output_tokens_per_second / n) : Json();
}

}  // namespace

Json plan_report(const PlanRequest& request, const Plan& plan, const std::vector<Change>& changes) {
  Json memory = Json::object(), bring = Json::array();
  for (const DeviceMemory& m : plan.prediction.memory) {
    Json& of_device = memory[device_name(m.device)];
    of_device = {{"weights_bytes", m.weights_bytes},
                 {"kv_bytes", m.kv_bytes},
                 {"activation_bytes", m.activation_bytes},
                 {"reserve_bytes", m.reserve_bytes},
                 {"free_bytes", m.free_bytes()}};
    if (m.spare_bytes > 0) of_device["spare_bytes"] = m.spare_bytes;
  }
  for (const Change& change : changes) bring.push_back(change_report(change));
  Json report = {{"model", request.model_name},
                 {"machine", machine_to_json(request.machine)},
                 {"concurrency", plan.workload.concurrency},
                 {"context", plan.workload.context},
                 {"placement", placement_file(plan)},
                 {"memory", memory},
                 {"predicted", prediction_report(plan.prediction)},
                 {"drafts", drafts_report(plan.drafts)},
                 {"limit", plan.limit},
                 {"reasons", plan.reasons},
                 {"changes", bring}};
  if (!plan.commands.empty()) report["commands"] = plan.commands;
  if (!plan.standbys.empty()) report["standbys"] = plan.standbys;
  if (plan.balance)
    report["expert_balance"] = {{"placed", plan.balance->placed},
                                {"own", plan.balance->own},
                                {"eplb", plan.balance->eplb},
                                {"layers", plan.balance->n_layers},
                                {"layers_by_eplb", plan.balance->n_by_eplb}};
  return report;
}

Json placement_file(const Plan& plan) {
  Json file = placement_to_json(plan.placement);
  file["predicted"] = prediction_report(plan.prediction);
  return file;
}

Json prediction_report(const Prediction& p) {
  Json report = {{"decode_tokens_per_second", p.decode.tokens_per_second},
                 {"prefill_tokens_per_second", p.prefill.tokens_per_second},
                 {"tokens_per_second_per_user", p.tokens_per_second_per_user},
                 {"output_tokens_per_second", p.output_tokens_per_second},
                 {"output_tokens_per_second_per_gpu", per_gpu(p)},
                 {"step_seconds", p.decode.step_seconds},
                 {"time_to_first_token_seconds", p.time_to_first_token_seconds},
                 {"request_seconds", p.request_seconds}};
  report["load_seconds"] = p.load_seconds > 0 ? Json(p.load_seconds) : Json();
  const Phase& d = p.decode;
  report["time_per_layer_seconds"] = layer_report(d.n_moe > 0 ? d.moe : d.dense);
  report["decode"] = phase_report(p.decode);
  report["prefill"] = phase_report(p.prefill);
  return report;
}

std::string plan_text(const PlanRequest& request, const Plan& plan,
                      const std::vector<Change>& changes) {
  const Prediction& p = plan.prediction;
  const Json each = per_gpu(p);
  std::string text = fmt::format(
      "{} on {}\n{} sequence(s) of {} tokens, prompts of {}, answers of {}\n\n"
      "predicted   decode {:.2f} tokens/s ({:.2f} per user, {:.2f} ms per step)\n"
      "            prefill {:.1f} tokens/s, first token after {:.2f} s\n"
      "            a request takes {:.1f} s; all together {:.2f} tokens/s of answers{}\n",
      request.model_name, request.machine.name, plan.workload.concurrency, plan.workload.context,
      plan.workload.prompt_tokens, plan.workload.output_tokens, p.decode.tokens_per_second,
      p.tokens_per_second_per_user, p.decode.step_seconds * 1e3, p.prefill.tokens_per_second,
      p.time_to_first_token_seconds, p.request_seconds, p.output_tokens_per_second,
      each.is_null() ? "" : fmt::format(", {:.2f} per GPU", each.get<double>()));
  if (p.load_seconds > 0)
    text += fmt::format("            loading at least {:.0f} s\n", p.load_seconds);
  text += fmt::format("drafts      {}\n", drafts_in_words(plan.drafts));
  text += fmt::format("limit       {}\n\n{}\n{}\n", plan.limit, memory_table(p), parts_table(p));
  text += "why\n";
  for (const std::string& reason : plan.reasons) text += "  " + reason + "\n";
  if (!plan.commands.empty()) text += "how to start it\n";
  for (const std::string& command : plan.commands) text += "  " + command + "\n";
  return text + changes_text(plan, changes);
}

Json preset_report(const std::vector<Plan>& plans) {
  Json rows = Json::array();
  for (const Plan& plan : plans)
    rows.push_back({{"concurrency", plan.workload.concurrency},
                    {"gpus", plan.prediction.gpus_used()},
                    {"predicted", prediction_report(plan.prediction)}});
  return rows;
}

std::string preset_text(const std::vector<Plan>& plans) {
  std::string text = fmt::format("{:>12}{:>8}{:>14}{:>16}{:>18}{:>14}\n", "concurrency", "GPUs",
                                 "tokens/s", "tokens/s a GPU", "tokens/s a user", "first token");
  for (const Plan& plan : plans) {
    const Prediction& p = plan.prediction;
    const Json each = per_gpu(p);
    text += fmt::format("{:>12}{:>8}{:>14.1f}{:>16}{:>18.2f}{:>12.2f} s\n",
                        plan.workload.concurrency, p.gpus_used(), p.output_tokens_per_second,
                        each.is_null() ? "" : fmt::format("{:.1f}", each.get<double>()),
                        p.tokens_per_second_per_user, p.time_to_first_token_seconds);
  }
  return text;
}

Json batch_table_report(const BatchTable& table) {
  Json rows = Json::array();
  for (const BatchRow& row : table.rows)
    rows.push_back({{"tokens", row.tokens},
                    {"tokens_per_expert", row.tokens_per_expert},
                    {"experts_used", row.experts_used},
                    {"ops_per_byte", row.ops_per_byte},
                    {"experts_bound", row.reading ? "reading" : "arithmetic"},
                    {"longest_part", name_of(row.longest)},
                    {"step_seconds", row.step_seconds},
                    {"tokens_per_second", row.tokens_per_second},
                    {"kv_fits", row.kv_fits}});
  return {{"experts_on", table.on_gpu ? "gpu" : "cpu"},
          {"ridge_ops_per_byte", table.ridge_ops_per_byte},
          {"rows", rows}};
}

std::string batch_table_text(const BatchTable& table) {
  std::string text = fmt::format(
      "batches     a step of so many sequences, with this placement; the {} turns from reading to "
      "arithmetic at {:.0f} operations per byte\n"
      "{:>9}{:>12}{:>10}{:>10}{:>13}{:>15}{:>11}{:>13}\n",
      table.on_gpu ? "GPU" : "CPU", table.ridge_ops_per_byte, "sequences", "per expert", "experts",
      "ops/byte", "experts are", "longest part", "ms a step", "tokens/s");
  for (const BatchRow& row : table.rows)
    text +=
        fmt::format("{:>9}{:>12.2f}{:>10.1f}{:>10.1f}{:>13}{:>15}{:>11.2f}{:>13.1f}{}\n",
                    row.tokens, row.tokens_per_expert, row.experts_used, row.ops_per_byte,
                    row.reading ? "read" : "computed", name_of(row.longest), row.step_seconds * 1e3,
                    row.tokens_per_second, row.kv_fits ? "" : "  (KV cache does not fit)");
  return text;
}

namespace {

Json layer_report(const LayerTime& layer) {
  Json parts = Json::object();
  for (int i = 0; i < kNumParts; ++i)
    if (layer.parts[i] > 0) parts[name_of(static_cast<Part>(i))] = layer.parts[i];
  return parts;
}

Json phase_report(const Phase& phase) {
  Json report = {{"tokens", phase.tokens}, {"step_seconds", phase.step_seconds}};
  const auto add = [&](const char* name, const LayerTime& layer, int n) {
    if (n > 0)
      report[name] = {{"layers", n}, {"seconds", layer.seconds}, {"parts", layer_report(layer)}};
  };
  add("dense_layer", phase.dense, phase.n_dense);
  add("moe_layer", phase.moe, phase.n_moe);
  report["embedding_seconds"] = phase.embedding_seconds;
  report["head_seconds"] = phase.head_seconds;
  report["streamed"] = phase.streamed;
  return report;
}

Json drafts_report(const DraftPlan& drafts) {
  Json steps = Json::array();
  for (const DraftedStep& step : drafts.steps)
    steps.push_back({{"draft_tokens", step.n_drafts},
                     {"tokens_per_step", step.tokens},
                     {"experts_per_layer", step.experts},
                     {"draft_seconds", step.draft_seconds},
                     {"step_seconds", step.step_seconds},
                     {"tokens_per_second", step.tokens_per_second},
                     {"times_without", drafts.times(step)}});
  return {{"draft_tokens", drafts.n_best},
          {"acceptance", drafts.acceptance},
          {"source", drafts.with_mtp ? "mtp" : "lookup"},
          {"mtp_bytes", drafts.mtp_bytes},
          {"steps", steps}};
}

Json change_report(const Change& change) {
  Json report = {{"change", change.what}};
  if (!change.fits) {
    report["refusal"] = change.refusal;
    return report;
  }
  report["decode_tokens_per_second"] = change.prediction.decode.tokens_per_second;
  report["prefill_tokens_per_second"] = change.prediction.prefill.tokens_per_second;
  return report;
}

// Devices with equal contents share a line.
std::string memory_table(const Prediction& p) {
  std::string text = fmt::format("{:<30}{:>9}{:>9}{:>13}{:>9}{:>9}\n", "memory, GB", "weights",
                                 "KV", "activations", "free", "of");
  const auto numbers = [](const DeviceMemory& m) {
    return fmt::format("{:>9.2f}{:>9.2f}{:>13.2f}{:>9.2f}{:>9.1f}\n", gigabytes(m.weights_bytes),
                       gigabytes(m.kv_bytes), gigabytes(m.activation_bytes),
                       gigabytes(m.free_bytes()), gigabytes(m.capacity_bytes));
  };
  std::vector<std::pair<std::string, std::pair<DeviceId, int>>> lines;  // first device, count
  for (const DeviceMemory& m : p.memory) {
    const std::string line = numbers(m);
    bool found = false;
    for (auto& [other, devices] : lines)
      if (other == line && devices.first.is_cpu() == m.device.is_cpu()) {
        ++devices.second;
        found = true;
      }
    if (!found) lines.push_back({line, {m.device, 1}});
  }
  for (const auto& [line, devices] : lines) {
    std::string name = device_name(devices.first);
    if (devices.second > 1) name += fmt::format(" and {} alike", devices.second - 1);
    text += fmt::format("  {:<28}{}", name, line);
  }
  return text;
}

std::string parts_table(const Prediction& p) {
  std::string text = fmt::format("{:<30}{:>12}{:>12}{:>12}{:>12}\n", "time per layer, ms",
                                 "decode MoE", "dense", "prefill MoE", "dense");
  const LayerTime* columns[] = {&p.decode.moe, &p.decode.dense, &p.prefill.moe, &p.prefill.dense};
  const auto row = [&](const std::string& name, auto value) {
    std::string line = fmt::format("  {:<28}", name);
    bool any = false;
    for (const LayerTime* column : columns) {
      const double ms = value(*column) * 1e3;
      any |= ms > 0;
      line += ms > 0 ? fmt::format("{:>12.3f}", ms) : fmt::format("{:>12}", "");
    }
    if (any) text += line + "\n";
  };
  for (int i = 0; i < kNumParts; ++i)
    row(name_of(static_cast<Part>(i)), [i](const LayerTime& t) { return t.parts[i]; });
  row("one layer, with overlap", [](const LayerTime& t) { return t.seconds; });
  return text + fmt::format("  {:<28}{:>12}{:>12}{:>12}{:>12}\n", "layers", p.decode.n_moe,
                            p.decode.n_dense, p.prefill.n_moe, p.prefill.n_dense);
}

std::string changes_text(const Plan& plan, const std::vector<Change>& changes) {
  if (changes.empty()) return {};
  std::string text = "effect of single changes\n";
  const auto percent = [](double then, double now) { return (then / now - 1) * 100; };
  for (const Change& c : changes) {
    if (!c.fits) {
      text += fmt::format("  {}: {}\n", c.what, c.refusal);
      continue;
    }
    const double decode = c.prediction.decode.tokens_per_second;
    const double prefill = c.prediction.prefill.tokens_per_second;
    text += fmt::format("  {}: decode {:.2f} tokens/s ({:+.0f} %), prefill {:.1f} ({:+.0f} %)\n",
                        c.what, decode, percent(decode, plan.prediction.decode.tokens_per_second),
                        prefill, percent(prefill, plan.prediction.prefill.tokens_per_second));
  }
  return text;
}

}  // namespace
}  // namespace tandem
