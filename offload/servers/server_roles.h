// Which hosts of a machine become which servers: all compute prompts and answers behind
// `tandem route`, or some compute prompts for the others (docs/planned_servers.md). Pure.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "offload/plan/plan.h"
#include "offload/servers/server_speed.h"

namespace tandem {

// Servers of one kind of hosts that are alike.
struct PlannedServers {
  ServerRole role = ServerRole::kBoth;
  int kind = 0;                     // of their hosts
  int first_host = 0, n_hosts = 1;  // of each, one server after the other
  int n = 1;
  bool is_one_process = true;  // else of several ranks, or with experts on GPUs without a rank
  Placement placement;         // on a machine that consists of the first server's hosts
  int chunk_tokens = 512;
  int most_sequences = 1;  // of a server
};

// One way to divide the hosts, with the size of chunks that is best for it.
struct ServerDivision {
  std::vector<PlannedServers> servers;
  ServerSystem system;
  ServerSpeed speed;
};

struct ServerPlan {
  ServerDivision both;  // without roles
  // The best division into roles. Nothing: there is none, as `refusal` says.
  std::optional<ServerDivision> split;
  std::string refusal;
  bool split_is_better = false;
  // The rates between which that division is better, and the fewest tokens of prompts of the wanted
  // answers from which it is; 0: none.
  double pays_from_rate = 0, pays_to_rate = 0;
  int pays_from_prompt_tokens = 0;
  // No commands for servers whose options do not say where their placement has something.
  std::vector<std::string> reasons, commands;

  const ServerDivision& best() const { return split_is_better ? *split : both; }
};

// Servers have as few hosts of one kind as hold the model, with experts and cache in the formats of
// `plan`, a plan for the whole machine. Throws Error where the machine does not hold two of them.
ServerPlan plan_servers(const PlanRequest& request, const Plan& plan, const ServerGoal& goal);

}  // namespace tandem
