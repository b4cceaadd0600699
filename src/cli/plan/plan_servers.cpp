#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>

#include "cli/plan/plan_report.h"
#include "offload/simulation/arrivals.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kSeed = 1;

Json speed_report(const ServerSpeed& s) {
  return {{"requests_per_second", s.requests_per_second},
          {"tokens_per_second", s.tokens_per_second},
          {"first_token_seconds", s.first_token_seconds},
          {"p99_first_token_seconds", s.p99_first_token_seconds},
          {"gap_seconds", s.gap_seconds},
          {"p50_gap_seconds", s.p50_gap_seconds},
          {"p99_gap_seconds", s.p99_gap_seconds},
          {"request_seconds", s.request_seconds},
          {"sequences", s.sequences}};
}

Json division_report(const ServerDivision& d) {
  Json servers = Json::array();
  for (const PlannedServers& s : d.servers)
    servers.push_back({{"role", name_of(s.role)},
                       {"servers", s.n},
                       {"first_host", s.first_host},
                       {"hosts_of_each", s.n_hosts},
                       {"chunk_tokens", s.chunk_tokens},
                       {"most_sequences", s.most_sequences}});
  Json report = {{"servers", servers},
                 {"sustained", d.speed.sustained},
                 {"predicted", speed_report(d.speed)},
                 {"simulated", speed_report(simulated_speed(d.system, d.speed, kSeed))}};
  if (d.system.splits()) {
    report["keys_seconds"] = d.speed.keys_seconds;
    report["network_busy"] = d.speed.network_busy;
  }
  return report;
}

std::string row(const std::string& name, const ServerSpeed& s) {
  return fmt::format("{:<26}{:>11.3f}{:>10.2f}{:>10.2f}{:>10.2f}{:>10.1f}{:>10.1f}\n", name,
                     s.requests_per_second, s.tokens_per_second, s.first_token_seconds,
                     s.p99_first_token_seconds, s.p50_gap_seconds * 1e3, s.p99_gap_seconds * 1e3);
}

std::string rows(const ServerDivision& d) {
  std::map<ServerRole, int> servers;
  for (const PlannedServers& s : d.servers) servers[s.role] += s.n;
  std::string name, separator;
  for (const auto& [role, n] : servers) {
    name += fmt::format("{}{} {}", separator, n, name_of(role));
    separator = ", ";
  }
  if (!d.speed.sustained) name += " (too many)";
  return row(name, d.speed) + row("  simulated", simulated_speed(d.system, d.speed, kSeed));
}

}  // namespace

Json servers_report(const ServerPlan& plan) {
  Json report = {{"both", division_report(plan.both)},
                 {"split", plan.split ? division_report(*plan.split) : Json()},
                 {"split_is_better", plan.split_is_better}};
  if (!plan.split) report["refusal"] = plan.refusal;
  const auto known = [](auto value) { return value > 0 ? Json(value) : Json(); };
  report["pays_from_requests_per_second"] = known(plan.pays_from_rate);
  report["pays_to_requests_per_second"] = known(plan.pays_to_rate);
  report["pays_from_prompt_tokens"] = known(plan.pays_from_prompt_tokens);
  report["reasons"] = plan.reasons;
  report["commands"] = plan.commands;
  return report;
}

std::string servers_text(const ServerPlan& plan) {
  std::string text = fmt::format(
      "servers for requests that arrive at random\n{:<26}{:>11}{:>10}{:>20}{:>20}\n"
      "{:<26}{:>11}{:>10}{:>10}{:>10}{:>10}{:>10}\n",
      "", "requests/s", "tokens/s", "first token, s", "gap, ms", "", "", "", "mean", "99 %", "half",
      "99 %");
  text += rows(plan.both);
  if (plan.split) text += rows(*plan.split);
  for (const std::string& reason : plan.reasons) text += "  " + reason + "\n";
  if (!plan.commands.empty()) text += "how to start them\n";
  for (const std::string& command : plan.commands) text += "  " + command + "\n";
  return text;
}

}  // namespace tandem
