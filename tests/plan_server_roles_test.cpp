// Which hosts become which servers, from the shapes of a machine and the requests.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "offload/servers/server_roles.h"
#include "tests/planner_cases.h"

namespace tandem {
namespace {

// Hosts of round figures that are connected.
Machine connected(int n) {
  Machine m = round_machine();
  m.hosts = n;
  m.network = {10e9, 5e-6};
  return m;
}

Workload chat(int concurrency, int prompt = 1024, int output = 256) {
  Workload w;
  w.concurrency = concurrency;
  w.prompt_tokens = prompt;
  w.output_tokens = output;
  return w;
}

ServerPlan servers_of(const Planned& planned, ServerGoal goal) {
  return plan_servers(planned.request, planned.plan(), goal);
}

int n_with(const ServerDivision& d, ServerRole role) {
  int n = 0;
  for (const PlannedServers& s : d.servers) n += s.role == role ? s.n : 0;
  return n;
}

bool has_reason(const ServerPlan& plan, const std::string& text) {
  return std::any_of(plan.reasons.begin(), plan.reasons.end(),
                     [&](const std::string& r) { return r.find(text) != std::string::npos; });
}

// A step of both kinds takes no less than either, and no more than one after the other.
TEST(ServedStep, IsBetweenEitherAndBoth) {
  const Planned planned("v2-lite", connected(1), chat(4));
  const Placement p = planned.plan().placement;
  const PlanInput in = {planned.config, planned.machine, planned.request.workload, planned.routing};
  const auto step = [&](int sequences, int tokens) {
    return served_step_seconds(in, p, sequences, tokens);
  };
  EXPECT_DOUBLE_EQ(step(4, 0), predict(in, p).decode.step_seconds);
  EXPECT_DOUBLE_EQ(step(0, 512), predict_step(in, p, {512, 768, true, 1}).step_seconds);
  for (const int sequences : {1, 16, 64})
    for (const int tokens : {64, 512}) {
      const double both = step(sequences, tokens);
      EXPECT_GT(both, std::max(step(sequences, 0), step(0, tokens)));
      EXPECT_LT(both, step(sequences, 0) + step(0, tokens));
    }
}

// Longer answers make the attention of sequences longer, and nothing else of a step.
TEST(ServedStep, SequencesAttendToTheirOwnContext) {
  const Planned planned("v2-lite", connected(1), chat(4));
  const Placement p = planned.plan().placement;
  Workload longer = planned.request.workload;
  longer.output_tokens = 6000;
  const auto more = [&](int sequences, int tokens) {
    const auto step = [&](const Workload& w) {
      return served_step_seconds({planned.config, planned.machine, w, planned.routing}, p,
                                 sequences, tokens);
    };
    return step(longer) - step(planned.request.workload);
  };
  EXPECT_GT(more(16, 0), 1e-5);
  EXPECT_NEAR(more(16, 512), more(16, 0), 1e-9);
  EXPECT_EQ(more(0, 512), 0);
}

TEST(ServerRoles, EveryHostIsAServerThatHoldsTheModel) {
  const Planned planned("v2-lite", connected(4), chat(8));
  const ServerPlan plan = servers_of(planned, {.concurrency = 8});
  EXPECT_EQ(n_with(plan.both, ServerRole::kBoth), 4);
  ASSERT_TRUE(plan.split);
  EXPECT_EQ(n_with(*plan.split, ServerRole::kPrefill) + n_with(*plan.split, ServerRole::kDecode),
            4);
  EXPECT_EQ(plan.both.servers[0].n_hosts, 1);
  EXPECT_NEAR(plan.both.speed.requests_per_second * plan.both.speed.request_seconds, 8, 0.1);
  EXPECT_EQ(plan.split->system.kv_bytes_per_token, 27 * 576 * 2) << "latents in BF16";
  EXPECT_EQ(plan.split->system.network.bytes_per_second, 10e9);
}

// R1 in FP8 needs 671 GB: two hosts of 400 GB each.
TEST(ServerRoles, AServerHasAsFewHostsAsHoldTheModel) {
  Machine m = connected(5);
  m.nodes[0].memory_bytes = 400'000'000'000;
  const Planned planned("r1", m, chat(4));
  const ServerPlan plan = servers_of(planned, {.concurrency = 4});
  ASSERT_EQ(plan.both.servers.size(), 1u);
  EXPECT_EQ(plan.both.servers[0].n_hosts, 2);
  EXPECT_EQ(plan.both.servers[0].n, 2);
  EXPECT_FALSE(plan.both.servers[0].is_one_process);
  EXPECT_TRUE(plan.commands.empty());
  EXPECT_TRUE(has_reason(plan, "2 server(s) of 2 host(s), whose placement no options of serve "));
  // One host with several GPUs is several ranks too.
  const Planned gpus("r1", known_machine("32xh800"), chat(0));
  const ServerPlan of_gpus = servers_of(gpus, {.requests_per_second = 0.25});
  EXPECT_EQ(of_gpus.both.servers[0].n_hosts, 1);
  EXPECT_FALSE(of_gpus.both.servers[0].is_one_process);
  EXPECT_TRUE(has_reason(of_gpus, "4 server(s) of 1 host(s), which have several ranks"));
  EXPECT_TRUE(says(of_gpus.commands[0], "host0: tandem serve r1 --dp 8 --"));
  // Where two hosts hold the model, mpirun starts the ranks of a server.
  Machine small = known_machine("12x8xh100");
  for (NumaNode& node : small.nodes) node.memory_bytes = 4'000'000'000;
  small.hosts = 4;
  const ServerPlan of_two = servers_of({"r1", small, chat(4)}, {.concurrency = 4});
  EXPECT_EQ(of_two.both.servers[0].n_hosts, 2);
  ASSERT_GE(of_two.commands.size(), 2u) << has_reason(of_two, "no options");
  EXPECT_TRUE(says(of_two.commands[0],
                   "host0: mpirun -np 16 --host host0:8,host1:8 --bind-to none tandem serve r1 --"))
      << of_two.commands[0];
  EXPECT_TRUE(says(of_two.commands[1],
                   "host2: mpirun -np 16 --host host2:8,host3:8 --bind-to none tandem serve r1 --"))
      << of_two.commands[1];
}

// Prompts of 4,097 tokens leave a decode server one token each.
Planned with_long_prompts() { return {"v2-lite", connected(3), chat(12, 4097, 64)}; }

// A bound on gaps that the smallest chunk exceeds is only met with roles.
TEST(ServerRoles, ABoundOnGapsDecides) {
  const Planned planned = with_long_prompts();
  const auto with_bound = [&](double seconds) {
    return servers_of(planned, {.concurrency = 12, .gap_seconds = seconds});
  };
  const ServerPlan free = with_bound(0);
  EXPECT_GT(free.both.speed.p99_gap_seconds, 5 * free.split->speed.p99_gap_seconds);
  const double bound = free.split->speed.p99_gap_seconds * 1.01;
  const ServerPlan tight = with_bound(bound);
  EXPECT_LE(tight.split->speed.p99_gap_seconds, bound);
  EXPECT_GT(tight.both.speed.p99_gap_seconds, bound) << "the smallest chunk is too long";
  EXPECT_TRUE(tight.split_is_better);
  // A wider bound makes chunks small.
  const ServerPlan wide = with_bound(free.both.speed.p99_gap_seconds / 2);
  EXPECT_LT(wide.both.speed.p99_gap_seconds, free.both.speed.p99_gap_seconds / 2);
  EXPECT_LT(wide.both.servers[0].chunk_tokens, free.both.servers[0].chunk_tokens);
  EXPECT_FALSE(has_reason(tight, "nothing meets the bounds"));
  EXPECT_TRUE(has_reason(with_bound(1e-6), "nothing meets the bounds"));
}

TEST(ServerRoles, CommandsStartThePlan) {
  const Planned planned = with_long_prompts();
  const ServerPlan plan = servers_of(planned, {.concurrency = 12});
  ASSERT_TRUE(plan.split_is_better);
  const int n_prefill = n_with(*plan.split, ServerRole::kPrefill);
  const int n_decode = n_with(*plan.split, ServerRole::kDecode);
  ASSERT_EQ(std::ssize(plan.commands), 3 + (n_decode > 1));
  EXPECT_TRUE(says(plan.commands[0],
                   "host0: tandem serve v2-lite --role prefill --kv-listen host0:9100 --kv-secret "
                   "KEY --host host0 --port 8000 --device cuda"));
  EXPECT_TRUE(says(
      plan.commands[n_prefill],
      fmt::format("host{}: tandem serve v2-lite --role decode --prefill host0:9100", n_prefill)));
  EXPECT_TRUE(says(plan.commands[n_prefill], "--ctx 8192 --chunk "));
  // Without roles each server answers, behind a router.
  const Planned brief("v2-lite", connected(3), chat(12, 200, 64));
  const std::vector<std::string> both = servers_of(brief, {.concurrency = 12}).commands;
  ASSERT_EQ(both.size(), 4u);
  EXPECT_EQ(both[0].find("--role"), std::string::npos);
  EXPECT_TRUE(says(both[3],
                   "tandem route --backends "
                   "http://host0:8000,http://host1:8000,http://host2:8000 --host "));
}

// Hosts whose memory is fast decode, and those whose arithmetic is fast compute prompts.
TEST(ServerRoles, EveryKindDoesWhatItIsGoodFor) {
  Machine m = round_kinds(2);
  m.hosts = 2;
  m.network = {10e9, 5e-6};
  for (Gpu& gpu : m.gpus) gpu.read_bytes_per_second = 0.2e12;
  m.other_kinds[0].nodes[0].read_bytes_per_second = 2e12;
  m.other_kinds[0].peak = {20e12, 20e12, 0, 20e12};
  const Planned planned("v2-lite", m, chat(16, 4096, 512));
  const ServerPlan plan = servers_of(planned, {.concurrency = 16});
  ASSERT_TRUE(plan.split);
  for (const PlannedServers& s : plan.split->servers)
    EXPECT_EQ(s.kind == 0, s.role == ServerRole::kPrefill) << s.first_host;
  EXPECT_EQ(plan.split->system.network.bytes_per_second, 10e9) << "between the kinds";
}

TEST(ServerRoles, WhatPaysIsSo) {
  const Planned planned("v2-lite", connected(3), chat(0, 2048, 256));
  const ServerPlan first = servers_of(planned, {.concurrency = 0});
  const ServerGoal goal = {.concurrency = 0,
                           .gap_seconds = 1.5 * first.split->speed.p99_gap_seconds};
  const ServerPlan plan = servers_of(planned, goal);
  ASSERT_GT(plan.pays_from_rate, 0);
  EXPECT_GE(plan.pays_to_rate, plan.pays_from_rate);
  for (const double rate : {plan.pays_from_rate, plan.pays_to_rate}) {
    const ServerSpeed split = speed_at(plan.split->system, rate);
    const ServerSpeed both = speed_at(plan.both.system, rate);
    EXPECT_TRUE(split.sustained);
    EXPECT_TRUE((meets(goal, split) && !meets(goal, both)) ||
                split.request_seconds < both.request_seconds)
        << rate;
  }
  EXPECT_TRUE(has_reason(plan, "server(s) pay from"));
}

TEST(ServerRoles, ShortPromptsAndNoNetworkGiveNoRoles) {
  const Planned brief("v2-lite", connected(2), chat(2, 256, 64));
  const ServerPlan plan = servers_of(brief, {.concurrency = 2});
  EXPECT_FALSE(plan.split);
  EXPECT_FALSE(plan.split_is_better);
  EXPECT_TRUE(says(plan.refusal, "192 of a prompt's 256 tokens are in whole pages"));
  const Planned longer("v2-lite", connected(2), chat(2, 257 + 64, 64));
  EXPECT_TRUE(servers_of(longer, {.concurrency = 2}).split);
  Machine apart = connected(2);
  apart.network = {};
  const Planned unconnected("v2-lite", apart, chat(2));
  EXPECT_TRUE(says(servers_of(unconnected, {.concurrency = 2}).refusal, "no network"));
}

// The slower the network, the later the first token, until roles do not pay.
TEST(ServerRoles, TheNetworkIsPriced) {
  double before = 0;
  for (const double rate : {10e9, 100e6, 20e6}) {
    Machine m = connected(3);
    m.network.bytes_per_second = rate;
    const Planned planned("v2-lite", m, chat(3, 4096, 256));
    const ServerPlan plan = servers_of(planned, {.requests_per_second = 0.05});
    EXPECT_GT(plan.split->speed.keys_seconds, before);
    before = plan.split->speed.keys_seconds;
  }
  EXPECT_GT(before, 1) << "4032 tokens of 31 kB at 20 MB/s take 6 s";
}

TEST(ServerRoles, RefusesWhatCannotBePlanned) {
  const Planned one("v2-lite", connected(1), chat(1));
  EXPECT_TRUE(says(error_of([&] { servers_of(one, {}); }), "has room for 1 server(s)"));
  const Planned two("v2-lite", connected(2), chat(1));
  EXPECT_TRUE(says(error_of([&] { servers_of(two, {.requests_per_second = -1}); }),
                   "--request-rate -1: must be"));
  EXPECT_TRUE(says(error_of([&] { servers_of(two, {.concurrency = 1, .gap_seconds = 1e9}); }),
                   "--slo-gap 1e+09: must be"));
}

}  // namespace
}  // namespace tandem
