// Decisions of the planner: properties of every plan, and plans for the machines of machines/.
#include "offload/plan/plan.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "model/cost.h"
#include "offload/plan/candidates.h"
#include "offload/plan/placement_json.h"
#include "tests/error_of.h"
#include "tests/planner_cases.h"

namespace tandem {
namespace {

std::string all_reasons(const Plan& plan) {
  return fmt::format("{}", fmt::join(plan.reasons, "\n"));
}

int64_t experts_on_gpu(const Plan& plan) {
  int64_t n = 0;
  for (const LayerExperts& l : plan.placement.layers)
    for (const ExpertGroup& g : l.groups)
      if (!g.owners[0].is_cpu())
        n += static_cast<int64_t>(g.experts.size()) * (l.last - l.first + 1);
  return n;
}

// With long contexts the GPU takes as long as the CPU; two micro-batches then overlap, from the
// number of sequences on where that is faster.
TEST(Plan, MicroBatchesOverlapWhereGpuAndCpuTakeEquallyLong) {
  Machine machine = known_machine("2x9654-5090");
  machine.gpus[0].memory_bytes = 400'000'000'000;
  Workload w;
  w.context = 32768;
  w.prompt_tokens = 28000;
  w.output_tokens = 4000;
  w.concurrency = 16;
  w.objective = Objective::kThroughput;
  const Planned planned("r1", machine, w);
  const Plan plan = planned.plan();
  ASSERT_EQ(plan.placement.micro_batches, 2);
  EXPECT_TRUE(says(all_reasons(plan), "two micro-batches overlap"));
  const int from = plan.placement.micro_batches_from_sequences;
  ASSERT_GT(from, 2) << "with few each half reads nearly all that the whole does";
  ASSERT_LE(from, 16);
  const auto step = [&](int n, int micro_batches) {
    Placement p = plan.placement;
    p.micro_batches = micro_batches;
    p.micro_batches_from_sequences = 2;
    const PlanInput in = {planned.config, planned.machine, w, planned.routing};
    return predict_step(in, p, {static_cast<double>(n), 30000, false, 1}).step_seconds;
  };
  EXPECT_LT(step(from, 2), step(from, 1));
  EXPECT_GE(step(from - 1, 2), step(from - 1, 1));
  EXPECT_LT(step(16, 2), 0.9 * step(16, 1));
}

TEST(Plan, R1WithItsBackboneEmbeddingAndCacheOnOne4090) {
  Workload w;
  w.context = 32768;
  const Plan plan = Planned("r1", known_machine("2x6454s-4090"), w).plan();
  const Placement& p = plan.placement;
  EXPECT_EQ(p.stages[0].devices, (std::vector<DeviceId>{{0, 0}}));
  EXPECT_EQ(p.numa_columns, (NumaColumns{{1024, 1024}}));
  EXPECT_EQ(p.kv_tokens, 32768);
  // The embedding fits on the GPU, or a reason says that it moved.
  if (p.embedding_on_cpu) {
    EXPECT_TRUE(says(all_reasons(plan), "embedding on CPU: saves 1.85 GB"));
  }
  // Published for this machine: at most 13.7 tokens/s with INT4 experts. FP8 reads twice as much.
  EXPECT_GT(plan.prediction.decode.tokens_per_second, 8);
  EXPECT_LT(plan.prediction.decode.tokens_per_second, 20);
  EXPECT_TRUE(says(plan.limit, "cpu experts"));
}

// The cache of 9.2 GB in BF16 does not fit beside the backbone, the one of 5.2 GB in FP8 does.
TEST(Plan, ALongContextIsKeptInFp8WhereOnlyThatFitsTheGpu) {
  Workload w;
  w.context = 131'072;
  const Planned planned("r1", known_machine("2x6454s-4090"), w);
  const Plan plan = planned.plan();
  EXPECT_EQ(plan.placement.kv_type, DType::kF8E4M3);
  EXPECT_EQ(plan.placement.stages[0].devices, (std::vector<DeviceId>{{0, 0}}));
  EXPECT_EQ(plan.prediction.memory[1].kv_bytes, int64_t{131'072} * 61 * 656);
  EXPECT_TRUE(says(all_reasons(plan), "KV cache in FP8"));
  EXPECT_TRUE(says(all_reasons(plan), "in BF16 it would take 9.21 GB"));
  w.kv = DType::kBF16;
  const Plan in_bf16 = Planned("r1", known_machine("2x6454s-4090"), w).plan();
  EXPECT_TRUE(in_bf16.placement.stages[0].devices[0].is_cpu());
  EXPECT_LT(in_bf16.prediction.decode.tokens_per_second, plan.prediction.decode.tokens_per_second);
  // BF16 is kept where it fits, unless FP8 is requested.
  w.kv = {};
  w.context = 32768;
  EXPECT_EQ(Planned("r1", known_machine("2x6454s-4090"), w).plan().placement.kv_type, DType::kBF16);
  w.kv = DType::kF8E4M3;
  const Plan asked = Planned("r1", known_machine("2x6454s-4090"), w).plan();
  EXPECT_EQ(asked.placement.kv_type, DType::kF8E4M3);
  EXPECT_FALSE(says(all_reasons(asked), "does not fit there"));
  EXPECT_TRUE(says(error_of([&] { Planned("r1", known_machine("2x6980p"), w).plan(); }),
                   "only GPUs compute with it"));
}

TEST(Plan, WithoutMoreMemoryTheNextExpertWouldNotFit) {
  Workload w;
  w.context = 8192;
  const Planned planned("r1", known_machine("2x9654-5090"), w);
  const Plan plan = planned.plan();
  EXPECT_GT(experts_on_gpu(plan), 0);
  const DeviceMemory& gpu = plan.prediction.memory[1];
  EXPECT_LT(gpu.free_bytes(), routed_expert_bytes(planned.config, {DType::kF8E4M3}));
}

// Eight replicas on the GPUs of a host, where the exchange bounds prompts.
TEST(Plan, RowsBetweenRanksAreExactUnlessAskedOtherwise) {
  Workload w;
  w.context = 4096;
  w.concurrency = 256;
  w.objective = Objective::kThroughput;
  const Planned planned("r1", known_machine("8xh200"), w);
  const Plan exact = planned.plan();
  ASSERT_EQ(exact.placement.stages[0].dp(), 8);
  EXPECT_TRUE(rows_travel(exact.placement));
  EXPECT_EQ(exact.placement.expert_rows, ExpertRows::kExact);
  w.expert_rows = ExpertRows::kFp8;
  const Planned in_fp8("r1", known_machine("8xh200"), w);
  const Plan fp8 = in_fp8.plan();
  ASSERT_EQ(fp8.placement.stages[0].dp(), 8);
  EXPECT_EQ(fp8.placement.expert_rows, ExpertRows::kFp8);
  const double of_exact = exact.prediction.prefill.tokens_per_second;
  const double of_fp8 = fp8.prediction.prefill.tokens_per_second;
  EXPECT_GT(of_fp8, 1.05 * of_exact);
  // Each says what the other would be.
  const std::string reasons = all_reasons(exact), reasons_fp8 = all_reasons(fp8);
  EXPECT_TRUE(says(reasons, "rows between ranks exact (43.0 KB a row and its sum)")) << reasons;
  EXPECT_TRUE(says(reasons, fmt::format("--ep-rows fp8 (less accurate, 21.7 KB): {:.2f} ms, {:.1f}",
                                        1e3 * fp8.prediction.decode.step_seconds, of_fp8)))
      << reasons;
  EXPECT_TRUE(says(reasons_fp8, "in FP8, sums in BF16 (21.7 KB a row and its sum)")) << reasons_fp8;
  EXPECT_TRUE(says(reasons_fp8, fmt::format("exact (43.0 KB): {:.2f} ms, {:.1f} tokens/s",
                                            1e3 * exact.prediction.decode.step_seconds, of_exact)))
      << reasons_fp8;
  const auto gain = [](const Planned& of, const Plan& plan) {
    for (const Change& change : possible_changes(of.request, plan))
      if (change.what == "rows between ranks in fp8")
        return change.prediction.prefill.tokens_per_second;
    return 0.0;
  };
  EXPECT_EQ(gain(planned, exact), of_fp8);
  EXPECT_EQ(gain(in_fp8, fp8), 0);
}

// All of R1 on GPUs of four hosts.
TEST(Plan, RowsBetweenHostsOfGpusAreExactUnlessAskedOtherwise) {
  Workload w;
  w.context = 4096;
  w.prompt_tokens = w.output_tokens = 2048;
  w.concurrency = 1950;
  for (const ExpertRows rows : {ExpertRows::kExact, ExpertRows::kFp8}) {
    w.expert_rows = rows;
    const Plan plan = Planned("r1", known_machine("32xh800"), w).plan();
    ASSERT_EQ(plan.placement.stages[0].dp(), 32);
    EXPECT_EQ(experts_on_gpu(plan), 58 * 256);
    EXPECT_EQ(plan.placement.expert_rows, rows);
  }
}

// `--ranks N`: whatever is best with the backbone on N GPUs, or on the CPUs of N hosts.
TEST(Plan, MayHaveItsBackboneOnSoManyRanks) {
  Workload w;
  w.objective = Objective::kThroughput;
  w.concurrency = 16;
  Planned planned("r1", known_machine("8xh200"), w);
  for (const int n : {1, 2, 4, 8}) {
    planned.request.n_ranks = n;
    int64_t n_gpus = 0;
    for (const Stage& stage : planned.plan().placement.stages) n_gpus += std::ssize(stage.devices);
    EXPECT_EQ(n_gpus, n);
  }
  planned.request.n_ranks = 9;
  EXPECT_TRUE(says(error_of([&] { planned.plan(); }), "and its backbone on 9 ranks"));

  Machine hosts = known_machine("2x6454s-4090");
  hosts.hosts = 4;
  hosts.gpus.clear();
  hosts.network = {.bytes_per_second = 4e9, .latency_seconds = 5e-6};
  for (const Objective objective : {Objective::kLatency, Objective::kThroughput}) {
    Workload of_cpus = w;
    of_cpus.objective = objective;
    Planned on_cpus("r1", hosts, of_cpus);
    for (const int n : {1, 2, 4}) {
      on_cpus.request.n_ranks = n;
      int64_t n_cpus = 0;
      for (const Stage& stage : on_cpus.plan().placement.stages)
        n_cpus += std::ssize(stage.devices);
      EXPECT_EQ(n_cpus, n);
    }
  }
}

// Replicas of the backbone whose experts are on their own devices, on workers, or on both.
TEST(RowsTravel, BetweenReplicasWithoutWorkers) {
  Placement p = with_owners({{range(0, 128), {{0, 0}}}, {range(128, 256), {{0, 1}}}});
  EXPECT_FALSE(rows_travel(p)) << "one replica";
  p.stages[0].devices = {{0, 0}, {0, 1}};
  EXPECT_TRUE(rows_travel(p));
  p.stages[0].tp = 2;
  EXPECT_FALSE(rows_travel(p));
  p.stages[0].tp = 1;
  p.layers[0].groups[1].owners = {{1, 0}};
  EXPECT_FALSE(rows_travel(p)) << "a worker has some";
  p.layers.clear();
  EXPECT_FALSE(rows_travel(p)) << "no experts";
}

// One process has no other rank, GPUs of one replica add up sums, and rows to workers are exact.
TEST(Plan, RowsThatDoNotTravelStayExact) {
  Workload w;
  w.expert_rows = ExpertRows::kFp8;
  for (const char* machine : {"2x6454s-4090", "8xh200", "office-4090-3x256gb"}) {
    const Plan plan = Planned("r1", known_machine(machine), w).plan();
    EXPECT_EQ(plan.placement.stages[0].dp(), 1) << machine;
    EXPECT_EQ(plan.placement.expert_rows, ExpertRows::kExact) << machine;
    EXPECT_TRUE(says(all_reasons(plan), "--ep-rows fp8 changes nothing")) << machine;
  }
}

// CPUs of two hosts, each with a replica, over a network of 1 GB/s.
TEST(Plan, CpusSendRowsAsAsked) {
  Machine machine = known_machine("2x6980p");
  machine.hosts = 2;
  machine.network = {1e9, 10e-6};
  Workload w;
  w.concurrency = 64;
  w.objective = Objective::kThroughput;
  const Plan exact = Planned("r1", machine, w).plan();
  w.expert_rows = ExpertRows::kFp8;
  const Plan fp8 = Planned("r1", machine, w).plan();
  ASSERT_TRUE(rows_travel(exact.placement));
  EXPECT_EQ(exact.placement.expert_rows, ExpertRows::kExact);
  EXPECT_EQ(fp8.placement.expert_rows, ExpertRows::kFp8);
  Placement other = exact.placement;
  other.expert_rows = ExpertRows::kFp8;
  const ModelConfig r1 = known_model("r1");
  const RoutingStatistics routing(r1);
  const PlanInput in = {r1, machine, exact.workload, routing};
  EXPECT_LT(predict(in, other).decode.step_seconds,
            0.95 * predict(in, exact.placement).decode.step_seconds);
}

// Eight GPUs read an eighth of a dense layer each for the tokens of all, whose rows travel.
TEST(Plan, DenseLayersThatReplicasShareCostTheirRows) {
  Machine machine = known_machine("8xh200");
  Workload w;
  w.concurrency = 64;
  w.objective = Objective::kThroughput;
  Placement p = Planned("r1", machine, w).plan().placement;
  p.stages[0].tp = 1;
  const ModelConfig r1 = known_model("r1");
  const RoutingStatistics routing(r1);
  const auto dense_seconds = [&](bool replicated) {
    p.dense_replicated = replicated;
    const PlanInput in = {r1, machine, w, routing};
    return predict(in, p).decode.dense[Part::kDense];
  };
  machine.gpu_link = {1e15, 1e-9};
  const double whole = dense_seconds(true), at_no_cost = dense_seconds(false);
  EXPECT_LT(at_no_cost, 0.3 * whole);
  machine.gpu_link = {1e9, 1e-6};
  constexpr double kBytes = 2 * 64 * 7168 * 4;  // rows of all, and their sums
  EXPECT_NEAR(dense_seconds(false) - at_no_cost, kBytes / 1e9 + 2e-6, 0.01 * kBytes / 1e9);
}

// R1 beside a 5090: eight experts are exchanged at a time, so either device keeps memory for eight.
TEST(Plan, KeepsMemoryForExpertsThatMove) {
  Workload w;
  w.context = 8192;
  const Machine machine = known_machine("2x9654-5090");
  const Plan fixed = Planned("r1", machine, w).plan();
  w.experts_move = true;
  const Planned planned("r1", machine, w);
  const Plan moving = planned.plan();
  const int64_t expert = routed_expert_bytes(planned.config, {DType::kF8E4M3});
  EXPECT_EQ(experts_on_gpu(moving), experts_on_gpu(fixed) - 8);
  EXPECT_TRUE(moving.placement.room_to_move);
  for (const int device : {0, 1}) {
    EXPECT_EQ(moving.prediction.memory[device].spare_bytes, 8 * expert) << device;
    EXPECT_EQ(fixed.prediction.memory[device].spare_bytes, 0) << device;
  }
  EXPECT_LT(moving.prediction.memory[1].free_bytes(), expert);
  EXPECT_TRUE(says(all_reasons(moving), "8 of 44.05 MB on a device")) << all_reasons(moving);
}

TEST(Plan, HotExpertsAreThoseMeasuredHot) {
  const Planned planned("r1", known_machine("2x9654-5090"));
  nlohmann::json counts = nlohmann::json::array();
  for (int l = 3; l < 61; ++l) {
    std::vector<int> row(256, 20);
    for (int e = 0; e < 8; ++e) row[(7 * l + e) % 256] = 380;  // 8 * 380 + 248 * 20 = 8 * 1000
    counts.push_back(row);
  }
  const nlohmann::json text = {
      {"layers", 61}, {"experts", 256}, {"tokens", 1000}, {"counts", counts}};
  const RoutingStatistics measured(planned.config, text.dump(), "stats.json");
  const Plan plan =
      tandem::plan({"r1", planned.config, planned.machine, planned.request.workload, measured});
  ASSERT_GT(experts_on_gpu(plan), 100);
  for (const LayerExperts& l : plan.placement.layers)
    for (const ExpertGroup& g : l.groups)
      for (const int e : g.experts) {
        if (!g.owners[0].is_cpu()) {
          EXPECT_GT(measured.share(l.first, e), 0.3);
        }
      }
  EXPECT_GT(plan.prediction.decode.tokens_per_second,
            planned.plan().prediction.decode.tokens_per_second);
}

TEST(Plan, SaysWhatIsMissingWhenNothingFits) {
  const std::string refusal =
      error_of([] { Planned("r1", known_machine("desktop-192gb")).plan(); });
  EXPECT_TRUE(says(refusal, "r1 does not fit Desktop"));
  EXPECT_TRUE(says(refusal, "even with experts in int4, host0.cpu lacks 157.8 GB"));
  EXPECT_TRUE(says(refusal, "give it 162 GB more"));
  // The smallest change that the message names is enough, and 1 GB less is not.
  Machine m = known_machine("desktop-192gb");
  m.nodes[0].memory_bytes += 162'000'000'000;
  EXPECT_EQ(error_of([&] { Planned("r1", m).plan(); }), "no error");
  m.nodes[0].memory_bytes -= 1'000'000'000;
  EXPECT_NE(error_of([&] { Planned("r1", m).plan(); }), "no error");
}

TEST(Plan, SaysWhichWorkloadWouldFit) {
  const auto refusal = [](const Workload& w) {
    return error_of([&] { Planned("r1", known_machine("8xh200"), w).plan(); });
  };
  Machine m = known_machine("2x6980p");
  m.nodes.resize(1);
  m.nodes[0].memory_bytes = 800'000'000'000;
  const auto on_small = [&](const Workload& w) {
    return error_of([&] { Planned("r1", m, w).plan(); });
  };
  Workload w;
  w.experts = WeightFormat{DType::kF8E4M3};
  w.context = 16384;
  EXPECT_EQ(refusal(w), "no error");
  w.concurrency = 1000;
  const std::string many = on_small(w);
  const auto at = many.find("--concurrency ");
  ASSERT_NE(at, std::string::npos) << many;
  w.concurrency = std::stoi(many.substr(at + 14));
  EXPECT_EQ(on_small(w), "no error");
  ++w.concurrency;
  EXPECT_TRUE(says(on_small(w), "does not fit"));
  // INT4 is only suggested where it would fit.
  EXPECT_TRUE(says(on_small(w), "--experts int4"));
  w.concurrency = 1 << 19;
  EXPECT_FALSE(says(on_small(w), "--experts int4"));
}

TEST(Plan, TakesTheWidestFormatThatFits) {
  const auto format = [](const char* model, const char* machine) {
    return format_name(
        Planned(model, known_machine(machine)).plan().placement.layers[0].groups[0].format);
  };
  EXPECT_EQ(format("r1", "2x6454s-4090"), "fp8");
  EXPECT_EQ(format("r1", "threadripper-4090"), "int4");
  EXPECT_EQ(format("v2", "threadripper-4090"), "bf16");
  EXPECT_EQ(format("v2-lite", "desktop-192gb"), "bf16");
  EXPECT_EQ(format("k2-thinking", "2x6454s-4090"), "int4-32-bf16");
}

TEST(Plan, RefusesImpossibleWorkloads) {
  const auto refusal = [](const std::function<void(Workload&)>& change) {
    Workload w;
    change(w);
    return error_of([&] { Planned("r1", known_machine("2x6454s-4090"), w).plan(); });
  };
  EXPECT_TRUE(says(refusal([](Workload& w) { w.context = 0; }), "--ctx 0"));
  EXPECT_TRUE(says(refusal([](Workload& w) { w.context = 200'000; }), "--ctx 200000"));
  EXPECT_TRUE(says(refusal([](Workload& w) { w.concurrency = -1; }), "--concurrency -1"));
  EXPECT_TRUE(says(refusal([](Workload& w) { w.prompt_tokens = 9000; }), "raise it"));
}

// More of any resource never makes a request slower in a fixed format.
TEST(Plan, MoreMemoryOrBandwidthIsNeverSlower) {
  const auto score = [](Machine m, Objective objective, int concurrency) {
    Workload w;
    w.context = 4096;
    w.objective = objective;
    w.concurrency = concurrency;
    w.experts = WeightFormat{DType::kF8E4M3};
    return Planned("r1", std::move(m), w).plan().prediction.score;
  };
  const std::vector<std::pair<const char*, std::function<void(Machine&)>>> improvements = {
      {"memory", [](Machine& m) { m.nodes[0].memory_bytes += 300'000'000'000; }},
      {"GPU memory",
       [](Machine& m) {
         for (Gpu& g : m.gpus) g.memory_bytes += 8'000'000'000;
       }},
      {"a little GPU memory",
       [](Machine& m) {
         for (Gpu& g : m.gpus) g.memory_bytes += 50'000'000;
       }},
      {"bandwidth",
       [](Machine& m) {
         for (NumaNode& n : m.nodes) n.read_bytes_per_second *= 1.3;
         m.cross_read_bytes_per_second *= 1.3;
       }},
      {"GPU bandwidth",
       [](Machine& m) {
         for (Gpu& g : m.gpus) g.read_bytes_per_second *= 1.2;
       }},
      {"links",
       [](Machine& m) {
         for (Gpu& g : m.gpus) g.h2d_bytes_per_second *= 1.5, g.d2h_bytes_per_second *= 1.5;
         m.gpu_link.bytes_per_second *= 1.5;
         m.network.bytes_per_second *= 1.5;
       }},
      {"arithmetic", [](Machine& m) {
         for (PeakRates* p : {&m.peak, &m.gpus[0].peak}) p->bf16 *= 2, p->fp8 *= 2, p->int8 *= 2;
       }}};
  for (const char* machine : {"2x6454s-4090", "8xh20-96g", "home-32x4090"})
    for (const Objective objective : {Objective::kLatency, Objective::kThroughput})
      for (const int concurrency : {1, 16}) {
        const Machine base = known_machine(machine);
        const double before = score(base, objective, concurrency);
        for (const auto& [what, improve] : improvements) {
          Machine better = base;
          improve(better);
          EXPECT_LE(score(better, objective, concurrency), before * (1 + 1e-9))
              << what << " on " << machine << ", " << concurrency << " at a time";
        }
      }
}

TEST(Plan, ThroughputServesAsManyAsTheSpeedWantedAllows) {
  Workload w = throughput_of_clusters();
  w.tokens_per_second_per_user = 20;
  const Planned planned("r1", known_machine("8xh200"), w);
  const Plan plan = planned.plan();
  EXPECT_GE(plan.prediction.tokens_per_second_per_user, 20);
  EXPECT_GT(plan.workload.concurrency, 64);
  EXPECT_EQ(plan.placement.stages[0].dp(), 8);
  EXPECT_TRUE(says(all_reasons(plan), "expert parallel 8"));
  Workload slow = w;
  slow.tokens_per_second_per_user = 5;
  EXPECT_GE(Planned("r1", known_machine("8xh200"), slow).plan().prediction.output_tokens_per_second,
            plan.prediction.output_tokens_per_second);
}

// Published: 22,300 output tokens/s for a host of 8 GPUs with prompts of 2,000 tokens, on 12 hosts
// of which 9 decode. The prediction is within a factor of two.
TEST(Plan, ClusterIsWithinAFactorOfTwoOfWhatWasPublished) {
  Workload w = throughput_of_clusters();
  w.tokens_per_second_per_user = 20;
  const Plan plan = Planned("r1", known_machine("12x8xh100"), w).plan();
  const double a_host = plan.prediction.decode.tokens_per_second / 12;
  EXPECT_GT(a_host, 22'300 / 2.0);
  EXPECT_LT(a_host, 22'300 * 2.0);
}

// Gives eight experts of every layer a second owner.
TEST(Plan, SaysHowManyExpertsAreRedundant) {
  constexpr size_t kCopied = 8;
  const Planned planned("r1", known_machine("12x8xh100"), throughput_of_clusters());
  Placement p = planned.plan().placement;
  p.kv_tokens -= p.kv_tokens / 8;
  const auto with_redundant = [&] {
    std::string said;
    for (const std::string& reason : assess(planned.request, p).reasons)
      if (says(reason, "redundant experts a layer")) said += reason;
    return said;
  };
  EXPECT_TRUE(says(with_redundant(), "), 0 redundant experts"));
  for (LayerExperts& l : p.layers) {
    size_t n = 0;
    std::vector<ExpertGroup> copied;
    for (ExpertGroup& g : l.groups) {
      if (n == kCopied) break;
      ASSERT_EQ(g.owners.size(), 1u);
      ExpertGroup twice = g;
      twice.experts.resize(1);
      n += twice.experts.size();
      g.experts.erase(g.experts.begin(), g.experts.begin() + std::ssize(twice.experts));
      const DeviceId own = g.owners[0];
      twice.owners.push_back({(own.host + 1) % 12, own.gpu});
      std::sort(twice.owners.begin(), twice.owners.end());
      copied.push_back(twice);
    }
    std::erase_if(l.groups, [](const ExpertGroup& g) { return g.experts.empty(); });
    l.groups.insert(l.groups.end(), copied.begin(), copied.end());
  }
  EXPECT_TRUE(says(with_redundant(), "), 8 redundant experts")) << with_redundant();
}

TEST(Plan, StreamingPaysFromTheChunkItSays) {
  // A machine whose CPU has no matrix instructions and whose link is fast.
  const Planned planned("r1", known_machine("2x9654-5090"));
  const Plan plan = planned.plan();
  const PlanInput in = {planned.config, planned.machine, plan.workload, planned.routing};
  const int least = least_streamed_chunk(in, plan.placement);
  ASSERT_GT(least, 64);
  const auto seconds = [&](int tokens, int from) {
    Placement p = plan.placement;
    p.stream_from_tokens = from;
    return predict_step(in, p, {double(tokens), double(tokens), true, 1}).moe.seconds;
  };
  EXPECT_LT(seconds(least, 1), seconds(least, 0));
  EXPECT_GE(seconds(least - 64, 1), seconds(least - 64, 0));
}

TEST(Plan, AssessesEditedPlacements) {
  Workload w;
  w.context = 4096;
  const Planned planned("r1", known_machine("2x6454s-4090"), w);
  const Plan best = planned.plan();
  Placement edited = best.placement;
  edited.numa_columns.clear();
  const Plan worse = assess(planned.request, edited);
  EXPECT_LT(worse.prediction.decode.tokens_per_second, best.prediction.decode.tokens_per_second);
  edited.layers[0].groups[0].experts.pop_back();
  EXPECT_TRUE(says(error_of([&] { assess(planned.request, edited); }), "has no owner"));
}

TEST(Plan, NamesTheEfficienciesItUses) {
  Machine m = known_machine("2x6454s-4090");
  EXPECT_TRUE(says(all_reasons(Planned("r1", m).plan()), "defaults of amx"));
  m.curves = {{"experts", "fp8", {{1, 0.4}}}, {"absorbed", "", {{512, 0.5}}}};
  EXPECT_TRUE(says(all_reasons(Planned("r1", m).plan()),
                   "as measured on this machine for fp8 experts, attention absorbed"));
  EXPECT_FALSE(says(all_reasons(Planned("r1", known_machine("8xh200")).plan()), "defaults of"));
}

TEST(Plan, ChangesStateTheirEffect) {
  const Planned planned("r1", known_machine("2x6454s-4090"));
  const Plan plan = planned.plan();
  const std::vector<Change> changes = possible_changes(planned.request, plan);
  std::vector<std::string> names;  // more memory would not help and is not listed
  for (const Change& c : changes) names.push_back(c.what);
  EXPECT_EQ(names, (std::vector<std::string>{"another RTX 4090", "memory that is a quarter faster",
                                             "experts in int4"}));
  for (const Change& c : changes) {
    EXPECT_TRUE(c.fits) << c.what;
    EXPECT_LE(c.prediction.score, plan.prediction.score * (1 + 1e-9)) << c.what;
  }
}

}  // namespace
}  // namespace tandem
