#include "offload/servers/server_roles.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <set>

#include "core/check.h"
#include "core/rounding.h"
#include "model/cost.h"
#include "model/kv_layout.h"
#include "offload/plan/candidates.h"
#include "offload/plan/reasons.h"
#include "offload/plan/roles.h"

namespace tandem {
namespace {

constexpr int kPrefillFrom = 256;  // serve --prefill-from
constexpr int kMostBatch = 1024;   // sequences of a replica

// The servers that a kind of hosts has room for.
struct Room {
  int kind, n_hosts, n_servers;  // n_hosts: of each
};

// The plan of one server, which prices of its steps refer to.
struct PlannedServer : std::enable_shared_from_this<PlannedServer> {
  PlannedServer(const PlanRequest& r, Machine of_hosts, const Workload& w)
      : request(r),
        machine(std::move(of_hosts)),
        plan(plan_placement({r.model_name, r.config, machine, w, r.routing})),
        n_replicas(plan.placement.stages[0].dp()),
        most_sequences(std::min<int64_t>(
            kMostBatch,
            largest_concurrency(r.config, machine, plan.placement, w.context) / n_replicas)) {}

  // For prompts of so many tokens.
  std::shared_ptr<StepTable> steps(int prompt_tokens) const {
    Workload w = plan.workload;
    w.prompt_tokens = prompt_tokens;
    w.output_tokens = request.workload.output_tokens;
    return std::make_shared<StepTable>(
        [self = shared_from_this(), w](int sequences, int tokens) {
          return served_step_seconds(
              {self->request.config, self->machine, w, self->request.routing}, self->plan.placement,
              sequences, tokens);
        },
        plan.placement.stream_from_tokens);
  }
  // The CPUs of a host, alone or with one GPU.
  bool is_one_process() const {
    int n_devices = 0;
    for (const DeviceMemory& m : plan.prediction.memory)
      n_devices += m.weights_bytes > 0 && !m.device.is_cpu();
    return machine.hosts == 1 && n_devices <= 1;
  }

  const PlanRequest request;
  const Machine machine;
  const PlannedPlacement plan;
  const int n_replicas;
  const int64_t most_sequences;  // of a replica
};

// How many of the servers that a kind of hosts has room for get either role.
struct RoleCounts {
  int n_prefill, n_decode;
};
using Division = std::vector<RoleCounts>;  // [rooms]

class ServerPlanner {
 public:
  ServerPlanner(const PlanRequest& r, const Plan& plan, const ServerGoal& goal);
  ServerPlan run();

 private:
  void find_rooms();
  bool fits(int kind, int n_hosts) const;
  std::vector<Division> divisions() const;
  // A division, or servers without roles, with the best size of chunks for such prompts.
  ServerDivision priced(const Division* roles, int prompt_tokens);
  ServerDivision with_chunk(const Division* roles, int prompt_tokens, int chunk);
  PlannedServer& server(const Room& room, ServerRole role, int n_of_role);
  std::shared_ptr<StepTable> steps(const PlannedServer& of, int prompt_tokens);
  Link network_of(const std::vector<PlannedServers>& servers) const;
  bool better(const ServerSpeed& a, const ServerSpeed& b) const;
  void find_rates(ServerPlan& plan) const;
  int least_prompt(const Division& roles);

  PlanRequest r_;
  const ServerGoal goal_;
  std::vector<Room> rooms_;
  int n_servers_ = 0;
  // By kind of hosts, role and the number of sequences.
  std::map<std::tuple<int, ServerRole, int>, std::shared_ptr<PlannedServer>> servers_;
  std::map<std::pair<const PlannedServer*, int>, std::shared_ptr<StepTable>> steps_;
};

// Whether every stage has the backbone on as many devices, divided alike, and experts are on these
// or on the CPUs beside them: then --tp, --dp and --pp say where everything is.
bool is_even_grid(const Placement& p) {
  const Stage& like = p.stages[0];
  std::set<DeviceId> ranks;
  for (const Stage& stage : p.stages) {
    if (stage.tp != like.tp || stage.devices.size() != like.devices.size()) return false;
    for (const DeviceId device : stage.devices) {
      ranks.insert(device);
      ranks.insert({device.host});
    }
  }
  for (const LayerExperts& layer : p.layers)
    for (const ExpertGroup& group : layer.groups)
      for (const DeviceId owner : group.owners)
        if (!ranks.contains(owner)) return false;
  return true;
}

std::vector<std::string> reasons_of(const PlanRequest& r, const ServerGoal& goal,
                                    const ServerPlan& plan);
std::vector<std::string> commands_of(const PlanRequest& r, const ServerDivision& division);

}  // namespace

ServerPlan plan_servers(const PlanRequest& request, const Plan& plan, const ServerGoal& goal) {
  constexpr double kMostRate = 1e6, kMostSeconds = 1e6;
  require(goal.requests_per_second >= 0 && goal.requests_per_second <= kMostRate,
          "--request-rate {:g}: must be between 0 and {:g} requests a second",
          goal.requests_per_second, kMostRate);
  require(goal.gap_seconds >= 0 && goal.gap_seconds <= kMostSeconds,
          "--slo-gap {:g}: must be between 0 and {:g} seconds", goal.gap_seconds, kMostSeconds);
  return ServerPlanner(request, plan, goal).run();
}

namespace {

ServerPlanner::ServerPlanner(const PlanRequest& r, const Plan& plan, const ServerGoal& goal)
    : r_(r), goal_(goal) {
  r_.workload.kv = plan.placement.kv_type;
  if (!plan.placement.layers.empty())
    r_.workload.experts = plan.placement.layers[0].groups[0].format;
  r_.workload.redundant_experts.reset();
  find_rooms();
}

ServerPlan ServerPlanner::run() {
  const int prompt = r_.workload.prompt_tokens;
  ServerPlan plan;
  plan.both = priced(nullptr, prompt);
  const int paged = plan.both.system.paged_tokens();
  Division best;
  if (paged < kPrefillFrom)
    plan.refusal = fmt::format(
        "{} of a prompt's {} tokens are in whole pages, and the keys of fewer than {} are not "
        "fetched from other servers",
        paged, prompt, kPrefillFrom);
  else
    for (const Division& roles : divisions()) {
      ServerDivision division = priced(&roles, prompt);
      if (division.system.network.bytes_per_second == 0) continue;
      if (plan.split && !better(division.speed, plan.split->speed)) continue;
      plan.split = std::move(division);
      best = roles;
    }
  if (plan.split) {
    plan.split_is_better = better(plan.split->speed, plan.both.speed);
    find_rates(plan);
    plan.pays_from_prompt_tokens = least_prompt(best);
  } else if (plan.refusal.empty()) {
    plan.refusal = "no network connects the hosts";
  }
  plan.reasons = reasons_of(r_, goal_, plan);
  plan.commands = commands_of(r_, plan.best());
  return plan;
}

// Each server has as few hosts as hold the model.
void ServerPlanner::find_rooms() {
  for (int kind = 0; kind < r_.machine.n_kinds(); ++kind) {
    const int hosts = r_.machine.of_kind(kind).hosts;
    int least = 1;
    while (least <= hosts && !fits(kind, least)) ++least;
    if (least > hosts) continue;
    rooms_.push_back({kind, least, hosts / least});
    n_servers_ += hosts / least;
  }
  require(
      n_servers_ >= 2,
      "--servers: {} has room for {} server(s) with {} in the planned formats, each on hosts of "
      "one kind: two are needed; choose a machine with more hosts, or leave it out",
      r_.machine.name, n_servers_, r_.model_name);
}

bool ServerPlanner::fits(int kind, int n_hosts) const {
  const ModelConfig& c = r_.config;
  const HostKind& hosts = r_.machine.of_kind(kind);
  int64_t memory = hosts.memory_bytes(), experts = 0;
  for (const Gpu& gpu : hosts.gpus) memory += gpu.memory_bytes;
  for (int l = 0; l < c.n_layers && r_.workload.experts; ++l)
    if (c.is_moe(l)) experts += c.router.n_experts * routed_expert_bytes(c, *r_.workload.experts);
  if (experts > n_hosts * memory) return false;  // found without planning
  const Machine machine = hosts_alone(r_.machine, kind, n_hosts);
  Workload w = r_.workload;
  w.concurrency = 1;
  try {
    plan_placement({r_.model_name, c, machine, w, r_.routing});
    return true;
  } catch (const Error&) {
    return false;
  }
}

// Up to two kinds of hosts are divided in all ways, but for large numbers; of more kinds all
// servers have the same role.
std::vector<Division> ServerPlanner::divisions() const {
  std::vector<Division> all = {{}};
  for (const Room& room : rooms_) {
    HostKind servers;
    servers.hosts = room.n_servers;
    std::vector<int> counts =
        rooms_.size() > 2 ? std::vector{room.n_servers} : host_counts(servers);
    counts.insert(counts.begin(), 0);
    std::vector<Division> longer;
    for (const Division& begun : all)
      for (const int n : counts) {
        longer.push_back(begun);
        longer.back().push_back({n, room.n_servers - n});
      }
    all = std::move(longer);
  }
  const auto none = [](const Division& roles, int RoleCounts::*n) {
    return std::all_of(roles.begin(), roles.end(), [&](const RoleCounts& r) { return r.*n == 0; });
  };
  std::erase_if(all, [&](const Division& roles) {
    return none(roles, &RoleCounts::n_prefill) || none(roles, &RoleCounts::n_decode);
  });
  return all;
}

ServerDivision ServerPlanner::priced(const Division* roles, int prompt_tokens) {
  constexpr int kLeastChunk = 64;
  ServerDivision best = with_chunk(roles, prompt_tokens, kLeastChunk);
  int most = std::numeric_limits<int>::max();  // what the memory of all has room for
  for (const PlannedServers& s : best.servers)
    if (s.role != ServerRole::kDecode) most = std::min(most, s.placement.prefill_chunk_tokens);
  for (int chunk = 2 * kLeastChunk; chunk <= most && chunk < 2 * prompt_tokens; chunk *= 2) {
    ServerDivision other = with_chunk(roles, prompt_tokens, chunk);
    if (better(other.speed, best.speed)) best = std::move(other);
  }
  return best;
}

ServerDivision ServerPlanner::with_chunk(const Division* roles, int prompt_tokens, int chunk) {
  ServerDivision d;
  d.system.prompt_tokens = prompt_tokens;
  d.system.output_tokens = r_.workload.output_tokens;
  d.system.kv_bytes_per_token = static_cast<double>(
      kv_bytes_per_token(r_.config, *r_.workload.kv, 0, r_.config.n_layers - 1));
  int n_prefill = 0, n_decode = 0;
  for (size_t i = 0; roles && i < roles->size(); ++i)
    n_prefill += (*roles)[i].n_prefill, n_decode += (*roles)[i].n_decode;
  for (size_t i = 0; i < rooms_.size(); ++i) {
    const Room& room = rooms_[i];
    int first = r_.machine.first_host_of(room.kind);
    const auto add = [&](ServerRole role, int n, int n_of_role) {
      if (n == 0) return;
      const PlannedServer& one = server(room, role, n_of_role);
      const auto most = static_cast<int>(one.most_sequences);
      const int step = role == ServerRole::kDecode
                           ? std::max(one.plan.placement.prefill_chunk_tokens,
                                      static_cast<int>(round_up(most + kPageSize, kPageSize)))
                           : chunk;
      d.servers.push_back({role, room.kind, first, room.n_hosts, n, one.is_one_process(),
                           one.plan.placement, step, most * one.n_replicas});
      d.system.groups.push_back({role, n, one.n_replicas, steps(one, prompt_tokens), step, most});
      first += n * room.n_hosts;
    };
    if (!roles) {
      add(ServerRole::kBoth, room.n_servers, n_servers_);
    } else {
      add(ServerRole::kPrefill, (*roles)[i].n_prefill, n_prefill);
      add(ServerRole::kDecode, (*roles)[i].n_decode, n_decode);
    }
  }
  d.system.network = network_of(d.servers);
  d.speed = speed_for(d.system, goal_);
  return d;
}

// The plan of a server that gets its part of the sequences, or as many as it can.
PlannedServer& ServerPlanner::server(const Room& room, ServerRole role, int n_of_role) {
  Workload w = r_.workload;
  const Machine machine = hosts_alone(r_.machine, room.kind, room.n_hosts);
  const bool any = w.concurrency == 0 || goal_.requests_per_second > 0;
  // Room for twice its part, since requests arrive at random, and a power of two, so that few plans
  // are made.
  int most = 1;
  while (!any && most * n_of_role < 2 * w.concurrency) most *= 2;
  if (role == ServerRole::kPrefill) {
    w.output_tokens = 1;
    w.tokens_per_second_per_user = 0;
    most = std::min(most, std::max(1, machine.n_all_gpus()));
  }
  if (role == ServerRole::kDecode) w.first_token_seconds = 0;
  std::shared_ptr<PlannedServer>& known = servers_[{room.kind, role, any ? 0 : most}];
  if (any) w.objective = Objective::kThroughput;
  for (w.concurrency = any ? 0 : most; !known;) try {
      known = std::make_shared<PlannedServer>(r_, machine, w);
    } catch (const Error&) {
      if (w.concurrency < 2) throw;
      w.concurrency /= 2;  // the others wait
    }
  return *known;
}

std::shared_ptr<StepTable> ServerPlanner::steps(const PlannedServer& of, int prompt_tokens) {
  std::shared_ptr<StepTable>& known = steps_[{&of, prompt_tokens}];
  if (!known) known = of.steps(prompt_tokens);
  return known;
}

// The slowest of those between servers with different roles.
Link ServerPlanner::network_of(const std::vector<PlannedServers>& servers) const {
  Link slowest = {std::numeric_limits<double>::infinity(), 0};
  for (const PlannedServers& from : servers)
    for (const PlannedServers& to : servers) {
      if (from.role != ServerRole::kPrefill || to.role != ServerRole::kDecode) continue;
      const Link link = r_.machine.link(from.first_host, to.first_host);
      slowest.bytes_per_second = std::min(slowest.bytes_per_second, link.bytes_per_second);
      slowest.latency_seconds = std::max(slowest.latency_seconds, link.latency_seconds);
    }
  return std::isinf(slowest.bytes_per_second) ? Link{} : slowest;
}

bool ServerPlanner::better(const ServerSpeed& a, const ServerSpeed& b) const {
  constexpr double kAsGood = 1e-3;
  const bool a_meets = meets(goal_, a), b_meets = meets(goal_, b);
  if (a_meets != b_meets) return a_meets;
  const double ratio = a.tokens_per_second / b.tokens_per_second;
  if (std::abs(ratio - 1) > kAsGood) return ratio > 1;
  return a.request_seconds < b.request_seconds;
}

// Tries 48 rates, each a tenth higher than the one before, up to the highest that either sustains.
void ServerPlanner::find_rates(ServerPlan& plan) const {
  constexpr int kRates = 48;
  double rate = std::max(most_requests_per_second(plan.both.system),
                         most_requests_per_second(plan.split->system));
  for (int i = 0; i < kRates; ++i, rate /= 1.1) {
    const ServerSpeed split = speed_at(plan.split->system, rate);
    if (!split.sustained || !better(split, speed_at(plan.both.system, rate))) continue;
    plan.pays_from_rate = rate;
    if (plan.pays_to_rate == 0) plan.pays_to_rate = rate;
  }
}

// By powers of two.
int ServerPlanner::least_prompt(const Division& roles) {
  int least = 0;
  for (int tokens = 2 * kPrefillFrom; tokens + r_.workload.output_tokens <= r_.workload.context;
       tokens *= 2) {
    const bool pays = better(priced(&roles, tokens).speed, priced(nullptr, tokens).speed);
    if (!pays) least = 0;
    if (pays && least == 0) least = tokens;
  }
  return least;
}

std::string in_words(const ServerDivision& d) {
  const auto n_with = [&](ServerRole role) {
    int n = 0;
    for (const PlannedServers& s : d.servers) n += s.role == role ? s.n : 0;
    return n;
  };
  if (!d.system.splits())
    return fmt::format("{} servers that compute prompts and answers", n_with(ServerRole::kBoth));
  return fmt::format("{} prefill and {} decode server(s)", n_with(ServerRole::kPrefill),
                     n_with(ServerRole::kDecode));
}

// Seconds of a decode step and of one with a chunk of a prompt, in the first group.
std::string steps_in_words(const ServerDivision& d, const PlannedServers& s) {
  const ServerGroup& g = d.system.groups.front();
  const double others = d.speed.sequences / g.queues();
  const double piece = std::min(s.chunk_tokens, d.system.prompt_tokens);
  return fmt::format("{:.1f} instead of {:.1f} ms with {:.1f} sequences",
                     milli((*g.step)(others + 1, piece)), milli((*g.step)(others + 1, 0)),
                     others + 1);
}

std::vector<std::string> reasons_of(const PlanRequest& r, const ServerGoal& goal,
                                    const ServerPlan& plan) {
  std::vector<std::string> words;
  const ServerDivision& best = plan.best();
  const std::vector<PlannedServers>& all = plan.both.servers;
  for (const PlannedServers& s : all)
    words.push_back(fmt::format("{} and the hosts like it: {} server(s) of {} host(s){}",
                                name_of_host(r.machine, s.first_host), s.n, s.n_hosts,
                                s.is_one_process ? ""
                                : is_even_grid(s.placement)
                                    ? ", which have several ranks"
                                    : ", whose placement no options of serve describe"));
  words.push_back(fmt::format("best: {}{}", in_words(best),
                              meets(goal, best.speed) ? "" : "; nothing meets the bounds"));
  words.push_back(fmt::format("without roles, steps with {} tokens of a prompt stop answers: {}",
                              std::min(all[0].chunk_tokens, plan.both.system.prompt_tokens),
                              steps_in_words(plan.both, all[0])));
  if (!plan.split) {
    words.push_back("no server gets a role: " + plan.refusal);
    return words;
  }
  const ServerSystem& split = plan.split->system;
  words.push_back(fmt::format(
      "keys of a prompt are {:.1f} MB, of which the last take {:.1f} ms after its last chunk; the "
      "network is busy {:.1f} % of the time",
      split.paged_tokens() * split.kv_bytes_per_token * 1e-6, milli(plan.split->speed.keys_seconds),
      100 * plan.split->speed.network_busy));
  words.push_back(plan.pays_from_rate > 0
                      ? fmt::format("{} pay from {:.3g} to {:.3g} requests/s",
                                    in_words(*plan.split), plan.pays_from_rate, plan.pays_to_rate)
                      : fmt::format("{} pay at no rate of requests", in_words(*plan.split)));
  const int output = r.workload.output_tokens;
  words.push_back(
      plan.pays_from_prompt_tokens > 0
          ? fmt::format("with answers of {} tokens they pay from prompts of {} on, {:.2g} times as "
                        "long",
                        output, plan.pays_from_prompt_tokens,
                        static_cast<double>(plan.pays_from_prompt_tokens) / output)
          : fmt::format("with answers of {} tokens they pay for no prompts up to {}", output,
                        r.workload.context - output));
  return words;
}

// What starts the ranks of a server whose hosts begin with `first_host`, and their grid.
struct RanksInWords {
  std::string launcher, grid;
};
RanksInWords ranks_in_words(const PlannedServers& s, int first_host) {
  const std::vector<Stage>& stages = s.placement.stages;
  const auto n_stages = static_cast<int>(stages.size());
  const auto n = n_stages * static_cast<int>(stages[0].devices.size());
  RanksInWords words;
  if (n == 1) return words;
  for (const auto& [name, number] :
       {std::pair("--tp", stages[0].tp), std::pair("--dp", stages[0].dp()),
        std::pair("--pp", n_stages)})
    if (number > 1) words.grid += fmt::format(" {} {}", name, number);
  if (s.n_hosts == 1) return words;
  std::vector<std::string> hosts;
  for (int i = 0; i < s.n_hosts; ++i)
    hosts.push_back(fmt::format("host{}:{}", first_host + i, n / s.n_hosts));
  words.launcher = fmt::format("mpirun -np {} --host {} --bind-to none ", n, fmt::join(hosts, ","));
  return words;
}

std::vector<std::string> commands_of(const PlanRequest& r, const ServerDivision& d) {
  constexpr int kKeysPort = 9100, kPort = 8000, kRouterPort = 8080;
  if (!std::all_of(d.servers.begin(), d.servers.end(), [](const PlannedServers& s) {
        return s.is_one_process || is_even_grid(s.placement);
      }))
    return {};
  std::vector<std::string> prefill, answering, commands;
  std::string last;  // host, which has the router too
  const auto each_server = [&](const auto& visit) {
    for (const PlannedServers& s : d.servers)
      for (int i = 0; i < s.n; ++i) visit(s, s.first_host + i * s.n_hosts);
  };
  each_server([&](const PlannedServers& s, int first) {
    const std::string host = fmt::format("host{}", first);
    if (s.role == ServerRole::kPrefill)
      prefill.push_back(fmt::format("{}:{}", host, kKeysPort));
    else
      answering.push_back(fmt::format("http://{}:{}", host, kPort));
  });
  each_server([&](const PlannedServers& s, int first) {
    const std::string host = fmt::format("host{}", first);
    const RanksInWords ranks = ranks_in_words(s, first);
    last = host;
    std::string role;
    if (s.role == ServerRole::kPrefill)
      role = fmt::format(" --role prefill --kv-listen {}:{} --kv-secret KEY", host, kKeysPort);
    if (s.role == ServerRole::kDecode)
      role = fmt::format(" --role decode --prefill {} --kv-secret KEY", fmt::join(prefill, ","));
    const std::optional<WeightFormat> format = r.workload.experts;
    commands.push_back(fmt::format(
        "{}: {}tandem serve {}{}{} --host {} --port {} --device {}{}{} --ctx {} --chunk {} "
        "--max-batch {}",
        host, ranks.launcher, r.model_name, ranks.grid, role, host, kPort,
        s.placement.stages[0].devices[0].is_cpu() ? "cpu" : "cuda",
        !format || *format == stored_expert_format(r.config)
            ? ""
            : fmt::format(" --experts {}", format_name(*format)),
        *r.workload.kv == DType::kBF16 ? "" : " --kv fp8", r.workload.context, s.chunk_tokens,
        std::min(s.most_sequences / s.placement.stages[0].dp(), s.chunk_tokens)));
  });
  if (answering.size() > 1)
    commands.push_back(fmt::format("{0}: tandem route --backends {1} --host {0} --port {2}", last,
                                   fmt::join(answering, ","), kRouterPort));
  return commands;
}

}  // namespace
}  // namespace tandem
