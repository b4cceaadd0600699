// Known rules for R1 on clusters, and costs of layers computed by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "model/cost.h"
#include "model/kv_layout.h"
#include "model/parameters.h"
#include "offload/plan/layer_time.h"
#include "offload/plan/placement.h"
#include "offload/plan/rates.h"
#include "offload/simulation/simulated_routing.h"
#include "tests/planner_cases.h"

namespace tandem {
namespace {

TEST(ClusterRules, ParametersOfR1) {
  const ParameterCounts n = count_parameters(known_model("r1"));
  EXPECT_EQ(n.one_expert, 44'040'192);
  EXPECT_EQ(n.routed_experts, 653'908'770'816);
  EXPECT_NEAR(static_cast<double>(n.total - n.routed_experts), 17.118e9, 0.0005e9);
  EXPECT_EQ(kv_bytes_per_token(known_model("r1")), 70'272);
}

TEST(ClusterRules, LeastDataParallelForComputeBoundExperts) {
  EXPECT_EQ(least_dp_for_compute_bound(known_model("r1")), 32);
  EXPECT_EQ(least_dp_for_compute_bound(known_model("k2")), 48);
  EXPECT_NEAR(least_dp_for_compute_bound(known_model("v2-lite")), 10.67, 0.01);
  EXPECT_NEAR(least_dp_for_compute_bound(known_model("v2")), 26.67, 0.01);
}

TEST(ClusterRules, MostUsefulExpertParallelAndItsBound) {
  const ModelConfig r1 = known_model("r1");
  EXPECT_EQ(most_useful_ep(r1), 257);
  const auto us = [&](double rate) { return one_expert_read_seconds(r1, rate) * 1e6; };
  EXPECT_NEAR(us(known_machine("2x6454s-4090").gpus[0].read_bytes_per_second), 43.7, 0.05);
  EXPECT_NEAR(us(known_machine("16xh800").gpus[0].read_bytes_per_second), 13.1, 0.05);
  EXPECT_NEAR(us(known_machine("8xh20-96g").gpus[0].read_bytes_per_second), 11.0, 0.05);
  EXPECT_NEAR(us(known_machine("8xh200").gpus[0].read_bytes_per_second), 9.2, 0.05);
}

// 48 hosts of 8 H100: more GPUs than R1 has experts in a layer.
TEST(ClusterRules, ExpertParallelBeyondTheBoundOnlyWhereArithmeticTakesLonger) {
  Machine machine = known_machine("12x8xh100");
  machine.hosts = 48;
  Workload workload = throughput_of_clusters();
  const auto planned = [&](int concurrency) {
    workload.concurrency = concurrency;
    const Planned inputs("r1", machine, workload);
    const Plan plan = inputs.plan();
    std::set<std::pair<int, int>> owners;
    for (const ExpertGroup& group : plan.placement.layers[0].groups)
      for (const DeviceId owner : group.owners) owners.insert({owner.host, owner.gpu});
    std::string reason;
    for (const std::string& text : plan.reasons)
      if (text.starts_with("expert parallel")) reason = text;
    return std::pair(owners.size(), reason);
  };
  // 295 tokens an expert, 9,440 sequences, are the ridge of an H100 in FP8.
  const auto [few, few_reason] = planned(9'000);
  EXPECT_LE(few, 256u);
  EXPECT_NE(few_reason.find("(useful up to 257 = 256 routed + 1 shared), "), std::string::npos)
      << few_reason;
  const auto [many, many_reason] = planned(40'000);
  EXPECT_GT(many, 257u);
  EXPECT_NE(many_reason.find("(useful up to 257 = 256 routed + 1 shared, and beyond it where "
                             "arithmetic takes longer than reading), "),
            std::string::npos)
      << many_reason;
}

TEST(ClusterRules, RidgeBatchOfAnExpert) {
  const auto ridge = [](const char* machine, double PeakRates::*peak) {
    const Gpu gpu = known_machine(machine).gpus[0];
    return ridge_tokens_per_expert(gpu.peak.*peak, gpu.read_bytes_per_second, 1);
  };
  EXPECT_NEAR(ridge("16xh800", &PeakRates::fp8), 295, 1);
  EXPECT_NEAR(ridge("16xh800", &PeakRates::bf16), 148, 1);
  EXPECT_NEAR(ridge("8xh20-96g", &PeakRates::fp8), 37, 0.1);
  EXPECT_NEAR(ridge("2x6454s-4090", &PeakRates::bf16), 82, 0.5);
}

TEST(ClusterRules, SplitsThatAreNoMultipleOf128AreRefused) {
  EXPECT_FALSE(split_refusal("dense FFN", 18432, 1));
  EXPECT_FALSE(split_refusal("dense FFN", 18432, 16));
  EXPECT_EQ(*split_refusal("dense FFN", 18432, 32),
            "dense FFN 18432 / 32 = 576 is not a multiple of 128");
  EXPECT_FALSE(tensor_parallel_refusal(known_model("r1"), 8));
  EXPECT_EQ(*tensor_parallel_refusal(known_model("r1"), 32),
            "dense FFN 18432 / 32 = 576 is not a multiple of 128");
  EXPECT_EQ(*tensor_parallel_refusal(known_model("k2"), 128), "64 heads cannot be shared by 128");
  EXPECT_TRUE(tensor_parallel_refusal(known_model("v2-lite"), 2));  // 10944 / 2
}

// The sizes that docs/gpu_exchange.md names.
TEST(ClusterRules, BytesOfRowsBetweenRanks) {
  const RowBytes exact = row_bytes(known_model("r1"), ExpertRows::kExact);
  EXPECT_EQ(exact.there, 14'336);
  EXPECT_EQ(exact.back, 28'672);
  EXPECT_EQ(exact.both(), 14'336 + 28'672);
  const RowBytes fp8 = row_bytes(known_model("r1"), ExpertRows::kFp8);
  EXPECT_EQ(fp8.there, 7'392);
  EXPECT_EQ(fp8.back, 14'336);
}

// All of R1 in `format` with the layers in `pp` stages of 8-way tensor-parallel GPUs: the memory
// left for the KV cache on the fullest GPU.
int64_t room_under_tp_pp(const char* machine_name, WeightFormat format, int pp) {
  const ModelConfig r1 = known_model("r1");
  const Machine m = known_machine(machine_name);
  Placement p;
  p.backbone = format;
  for (int s = 0; s < pp; ++s) {
    Stage stage = {61 * s / pp, 61 * (s + 1) / pp - 1, {}, 8};
    for (int gpu = 0; gpu < 8; ++gpu) stage.devices.push_back({s, gpu});
    ExpertGroup group = {{}, format, stage.devices, true};
    for (int e = 0; e < 256; ++e) group.experts.push_back(e);
    p.layers.push_back({std::max(3, stage.first), stage.last, {group}});
    p.stages.push_back(stage);
  }
  p.head_replicated = false;
  int64_t room = m.gpus[0].memory_bytes;
  for (const DeviceMemory& d : memory_by_device(r1, m, p))
    if (!d.device.is_cpu()) room = std::min(room, d.free_bytes());
  return room;
}

TEST(ClusterRules, TensorAndPipelineParallelLeaveLittleRoomForKv) {
  // 8x H20-96G holds the FP8 weights and 12 to 17 GB beside them, and all eight GPUs hold the same
  // latents. BF16 weights do not fit either machine.
  const int64_t h20 = room_under_tp_pp("8xh20-96g", {DType::kF8E4M3}, 1);
  EXPECT_GT(h20, 0);
  EXPECT_LT(h20, 17'000'000'000);
  EXPECT_LT(room_under_tp_pp("8xh20-96g", {DType::kBF16}, 1), 0);
  EXPECT_LT(room_under_tp_pp("16xh800", {DType::kBF16}, 2), 0);
}

TEST(ClusterRules, TensorParallelCopiesTheLatentCacheDataParallelDoesNot) {
  const ModelConfig r1 = known_model("r1");
  const Machine m = known_machine("8xh200");
  const auto cache = [&](int tp) {
    Placement p;
    p.backbone = {DType::kF8E4M3};
    Stage stage = {0, 60, {}, tp};
    for (int gpu = 0; gpu < 8; ++gpu) stage.devices.push_back({0, gpu});
    p.stages = {stage};
    p.kv_tokens = 80'000 / stage.dp();  // all sequences together have 80,000 tokens
    int64_t sum = 0;
    for (const DeviceMemory& d : memory_by_device(r1, m, p)) sum += d.kv_bytes;
    return sum;
  };
  EXPECT_EQ(cache(1), 80'000 * int64_t{70'272});
  EXPECT_EQ(cache(8), 8 * cache(1));
}

TEST(PlanCost, BytesOfMatricesAndExperts) {
  const ModelConfig r1 = known_model("r1");
  // 44,040,192 weights and 2,688 float scales.
  EXPECT_EQ(routed_expert_bytes(r1, {DType::kF8E4M3}), 44'050'944);
  EXPECT_EQ(routed_expert_bytes(r1, {DType::kBF16}), 88'080'384);
  EXPECT_EQ(routed_expert_bytes(r1, {DType::kI8}), 44'040'192 + (2048 + 2048 + 7168) * 4);
  EXPECT_EQ(routed_expert_bytes(r1, {DType::kI4, 64}), 44'040'192 / 2 + 44'040'192 / 64 * 2);
  EXPECT_EQ(routed_expert_bytes(r1, {DType::kI4TwoLevel, 64}),
            44'040'192 / 2 + 44'040'192 / 64 + (2048 + 2048 + 7168) * 4);
  EXPECT_EQ(embedding_bytes(r1), 1'853'358'080);
  EXPECT_EQ(kv_planes(r1, 0, DType::kBF16).token_bytes(), 1152);
  const BackboneBytes moe = backbone_layer_bytes(r1, true, {DType::kBF16});
  EXPECT_EQ(moe.attention, 2 * (187'107'328 - 2048));  // without the norms of the latents
  EXPECT_EQ(moe.shared, 88'080'384);
  EXPECT_EQ(moe.dense, 0);
  EXPECT_EQ(backbone_layer_bytes(r1, false, {DType::kBF16}).dense, 2 * 396'361'728);
}

// A matrix of 2^24 x 2^24, the largest that a configuration may have.
TEST(PlanCost, LargeMatricesHaveTheirBytes) {
  const ModelConfig r1 = known_model("r1");
  constexpr int64_t kSize = 1 << 24, kNumbers = int64_t{1} << 48;
  const auto bytes = [&](WeightFormat format) { return matrix_bytes(r1, kSize, kSize, format); };
  EXPECT_EQ(bytes({DType::kBF16}), 2 * kNumbers);
  EXPECT_EQ(bytes({DType::kF8E4M3}), kNumbers + kNumbers / (128 * 128) * 4);
  EXPECT_EQ(bytes({DType::kI8}), kNumbers + kSize * 4);
  EXPECT_EQ(bytes({DType::kI4, 32}), kNumbers / 2 + kNumbers / 32 * 2);
  EXPECT_EQ(bytes({DType::kI4TwoLevel, 64}), kNumbers / 2 + kNumbers / 64 + kSize * 4);
}

// Under even routing an expert's share of the rows is 1/32. One with replicas is used by the rows
// of a replica; groups with and without replicas alternate.
TEST(PlanCost, ReplicasOfAnExpertShareItsTokens) {
  const ModelConfig r1 = known_model("r1");
  const Machine m = known_machine("8xh200");
  const RoutingStatistics routing(r1);
  const Workload w;
  const PlanInput in = {r1, m, w, routing};
  const WeightFormat fp8 = {DType::kF8E4M3};
  const LayerExperts experts = {3,
                                3,
                                {{{0, 1}, fp8, {{0, 0}}, false},
                                 {{2}, fp8, {{0, 1}, {0, 2}}, false},
                                 {{3}, fp8, {{0, 3}}, false},
                                 {{4}, fp8, {{0, 4}, {0, 5}, {0, 6}, {0, 7}}, false}}};
  const std::vector<ExpertLoad> loads = expert_loads(in, Placement{}, experts, 3, {64, 10}, {0, 0});
  const double held[] = {2, 1, 1, 1, 1, 1, 1, 1}, replicas[] = {1, 2, 2, 1, 4, 4, 4, 4};
  ASSERT_EQ(loads.size(), 8u);
  for (int gpu = 0; gpu < 8; ++gpu) {
    const ExpertLoad& load = loads[gpu];
    const double chance = 1 - std::pow(1 - 1 / (32 * replicas[gpu]), 10);
    EXPECT_EQ(load.owner.gpu, gpu);
    EXPECT_EQ(load.experts, held[gpu]);
    EXPECT_NEAR(load.used, held[gpu] * chance, 1e-9) << gpu;
    EXPECT_NEAR(load.variance, held[gpu] * chance * (1 - chance), 1e-9) << gpu;
    EXPECT_NEAR(load.rows, held[gpu] * 2 / replicas[gpu], 1e-9) << gpu;
    EXPECT_NEAR(load.bytes, load.used * 44'050'944, 1) << gpu;
  }
}

TEST(PlanCost, OperationsOfATokenAreTwiceTheActiveWeights) {
  const TokenOps ops = token_ops(known_model("r1"));
  EXPECT_EQ(ops.expert, 2.0 * 44'040'192);
  EXPECT_EQ(ops.shared, ops.expert);
  EXPECT_EQ(ops.head, 2.0 * 926'679'040);
  // The projections of q, kv_a and o take 340.66 MFLOP in both forms of attention.
  EXPECT_NEAR(ops.projections, 340.66e6, 0.01e6);
}

TEST(PlanCost, AttentionTakesTheFormWithFewerOperations) {
  const ModelConfig r1 = known_model("r1");
  const AttentionWork decode = attention_work(r1, 1, 4096);
  EXPECT_TRUE(decode.absorbed);
  EXPECT_EQ(decode.bytes, 4096 * 1152);
  EXPECT_EQ(decode.ops, 33'554'432.0 + 4096 * 278'528.0);
  // Ends of prompts of several lengths. In a new prompt the queries are never more than the keys.
  EXPECT_FALSE(attention_work(r1, 2, 2).absorbed);
  EXPECT_FALSE(attention_work(r1, 128, 128).absorbed);
  EXPECT_FALSE(attention_work(r1, 128, 321).absorbed);
  EXPECT_TRUE(attention_work(r1, 128, 322).absorbed);
  EXPECT_TRUE(attention_work(r1, 1, 2).absorbed);
  EXPECT_TRUE(attention_work(r1, 150, 4096).absorbed);
  EXPECT_FALSE(attention_work(r1, 200, 4096).absorbed);
  // 512 queries at the end of 512 tokens see 512 * 513 / 2 pairs.
  EXPECT_EQ(attention_work(r1, 512, 512).ops, 33'554'432.0 * 512 + 81'920.0 * (512 * 513 / 2));
}

// Eight of R1's experts for one token on the CPU of round_machine(): read at 100 GB/s, then
// computed at 1 Top/s.
constexpr double kEightExperts = 8 * (44'050'944 / 100e9 + 6 * 7168 * 2048 / 1e12);

TEST(Efficiency, IsTheTableBetweenItsPoints) {
  const auto f8 = [](double rows) {
    return product_ratio("avx512", Product::kExperts, DType::kF8E4M3, rows);
  };
  EXPECT_DOUBLE_EQ(f8(0.5), 1.06);
  EXPECT_DOUBLE_EQ(f8(1), 1.06);
  EXPECT_DOUBLE_EQ(f8(4.8), 1.24);
  EXPECT_DOUBLE_EQ(f8(1000), 0.87);
  EXPECT_NEAR(f8(std::sqrt(2.6 * 4.8)), (1.06 + 1.24) / 2, 1e-9);
  for (const char* kind : {"reference", "avx2", "avx512", "amx", "gpu"})
    for (const DType format :
         {DType::kF8E4M3, DType::kBF16, DType::kI8, DType::kI4, DType::kI4TwoLevel})
      for (double x = 1; x < 1e6; x *= 1.7) {
        for (const Product product : {Product::kExperts, Product::kDense})
          EXPECT_GT(product_ratio(kind, product, format, x), 0);
        EXPECT_LE(attention_ratio(kind, true, x), 1);
      }
}

TEST(Efficiency, AMachinesOwnCurvesComeFirst) {
  Machine m = round_machine();
  m.curves = {{"experts", "fp8", {{1, 0.5}, {100, 0.25}}}, {"absorbed", "", {{1000, 0.125}}}};
  const auto ratio = [&](Product product, DType format, double rows) {
    return product_ratio("avx512", product, format, rows, m.curves);
  };
  EXPECT_DOUBLE_EQ(ratio(Product::kExperts, DType::kF8E4M3, 10), (0.5 + 0.25) / 2);
  for (const auto& [product, format] :
       {std::pair{Product::kExperts, DType::kI8}, {Product::kDense, DType::kF8E4M3}})
    EXPECT_DOUBLE_EQ(ratio(product, format, 1), product_ratio("avx512", product, format, 1));
  EXPECT_DOUBLE_EQ(attention_ratio("avx512", true, 5, m.curves), 0.125);
  EXPECT_DOUBLE_EQ(attention_ratio("avx512", false, 512, m.curves), 0.67);
  // The layer's CPU time changes with the curve, its GPU time does not.
  const ModelConfig r1 = known_model("r1");
  const RoutingStatistics routing(r1);
  const Workload w;
  const Placement p = r1_with_experts_on_the_cpu();
  const auto time = [&](const Machine& machine) {
    const PlanInput in = {r1, machine, w, routing};
    return LayerModel(in, p, {1, 4096, false, 1}).layer(p.stages[0], 3, &p.layers[0]);
  };
  const LayerTime own = time(m), defaults = time(round_machine());
  EXPECT_NEAR(own[Part::kCpuExperts], kEightExperts / 0.5, 1e-9);
  EXPECT_EQ(own[Part::kShared], defaults[Part::kShared]);
  EXPECT_EQ(own[Part::kAttention], defaults[Part::kAttention]);
}

// R1 on round_machine(), with the backbone on the GPU and experts on the CPU.
class LayerTimeOfR1 : public testing::Test {
 protected:
  const ModelConfig r1 = known_model("r1");
  const Machine m = round_machine();
  const RoutingStatistics routing{r1};
  const Workload w;
  const PlanInput in = {r1, m, w, routing};
  Placement p = r1_with_experts_on_the_cpu();
};

// One sequence on round_machine() with the backbone on the GPU and experts on the CPU.
TEST_F(LayerTimeOfR1, OneTokenOfR1ByHand) {
  const LayerTime t = LayerModel(in, p, {1, 4096, false, 1}).layer(p.stages[0], 3, &p.layers[0]);
  // 8 experts with the efficiency of one row.
  EXPECT_NEAR(t[Part::kCpuExperts], kEightExperts / 1.06, 1e-9);
  EXPECT_NEAR(t[Part::kShared], 44'050'944 / 1e12 / 0.70, 1e-9);
  EXPECT_NEAR(t[Part::kRouter], 256 * 7168 * 2 / 1e12 / 0.70, 1e-12);
  // 1.17 Gop at 100 Tops/s take longer than reading 4.7 MB at 1 TB/s.
  EXPECT_NEAR(t[Part::kAttention], (33'554'432.0 + 4096 * 278'528.0) / 100e12 / 0.67, 1e-12);
  // A row of BF16 to the host and back at 10 GB/s, and two hand-offs.
  EXPECT_NEAR(t[Part::kExchange], 20e-6 + 2 * 14'336 / 10e9, 1e-12);
  // The CPU's experts hide the shared expert.
  EXPECT_NEAR(t.seconds,
              t[Part::kProjections] + t[Part::kAttention] + t[Part::kRouter] + t[Part::kOverhead] +
                  t[Part::kExchange] + t[Part::kCpuExperts],
              1e-12);
}

TEST(LayerTime, ExpectedDistinctExperts) {
  // E (1 - (1 - k / E)^n): 256 experts, 8 a token, 32 tokens.
  const ModelConfig r1 = known_model("r1");
  const RoutingStatistics routing(r1);
  const double used = 256 * chance_of_use(routing.share(3, 0), 32);
  EXPECT_NEAR(used, 256 * (1 - std::pow(1 - 8.0 / 256, 32)), 1e-9);
  EXPECT_NEAR(used, 163.3, 0.1);
  ModelConfig simulated = r1;
  // Balanced routing uses the same 32 experts.
  simulated.router.simulated = simulated_choices(simulated_routing("balanced-ranks:32"), r1, r1);
  const RoutingStatistics balanced(simulated);
  EXPECT_DOUBLE_EQ(256 * balanced.chance(3, 0, 2), 16);
  EXPECT_DOUBLE_EQ(256 * balanced.chance(3, 0, 4), 32);
  EXPECT_DOUBLE_EQ(256 * balanced.chance(3, 0, 1000), 32);
  // Random routing uses those of its table: about as many as even routing.
  simulated.router.simulated = simulated_choices(simulated_routing("grouped-random"), r1, r1);
  const RoutingStatistics random(simulated);
  double sum = 0;
  for (int e = 0; e < 256; ++e) sum += random.chance(3, e, 32);
  EXPECT_NEAR(sum, used, 0.02 * used);
  EXPECT_NEAR(simulated.router.simulated->expected_experts(32), used, 0.02 * used);
  EXPECT_EQ(chance_of_use(1, 5), 1);
}

TEST(Statistics, RefusesThoseOfAnotherModel) {
  const ModelConfig r1 = known_model("r1");
  const auto refusal = [&](const char* text) {
    return error_of([&] { RoutingStatistics(r1, text, "s.json"); });
  };
  EXPECT_TRUE(says(refusal(R"({"layers": 27, "experts": 64, "tokens": 9, "counts": []})"),
                   "27 layers with 64 experts, and the model has 61 with 256"));
  EXPECT_TRUE(says(refusal(R"({"layers": 61, "experts": 256, "tokens": 9, "counts": []})"),
                   "counts of 0 layers, and 58 have experts"));
  EXPECT_TRUE(
      says(refusal(R"({"layers": 61, "experts": 256, "tokens": 0, "counts": []})"), "tokens is 0"));
  // Another model with the same numbers of layers and experts.
  const ModelConfig lite = known_model("v2-lite"), moonlight = known_model("moonlight");
  ASSERT_EQ(lite.n_layers, moonlight.n_layers);
  ASSERT_EQ(lite.router.n_experts, moonlight.router.n_experts);
  RoutingCounts counts(moonlight);
  for (auto& layer : counts.of_layer)
    for (size_t e = 0; e < layer.size(); ++e) layer[e] = 6;
  const std::string recorded = routing_statistics_json(moonlight, counts);
  EXPECT_EQ(error_of([&] { RoutingStatistics(moonlight, recorded, "s.json"); }), "no error");
  EXPECT_TRUE(says(error_of([&] { RoutingStatistics(lite, recorded, "s.json"); }),
                   "s.json: statistics of another model: \"DeepseekV3ForCausalLM, 27 layers"));
  // Numbers are compared before shapes.
  EXPECT_TRUE(says(error_of([&] { RoutingStatistics(known_model("r1"), recorded, "s.json"); }),
                   "s.json: statistics of 27 layers with 64 experts"));
  nlohmann::json zeros = {{"layers", 61}, {"experts", 256}, {"tokens", 9}};
  zeros["counts"] = std::vector<std::vector<int>>(58, std::vector<int>(256, 0));
  EXPECT_TRUE(says(refusal(zeros.dump().c_str()), "add up to 0.00 experts a token"));
  zeros["counts"][0][7] = 10;
  EXPECT_TRUE(says(refusal(zeros.dump().c_str()), "expected a number 0 .. tokens"));
}

TEST(Statistics, ReadsWhatAServerAnswers) {
  const ModelConfig r1 = known_model("r1");
  nlohmann::json served = {{"window_steps", 1000}, {"steps", 9}, {"tokens", 256}, {"load", {1}}};
  for (int l = 3; l < 62; ++l) {  // the last one is for multi-token prediction
    std::vector<int> counts(256, 8);
    if (l < 61) counts[l] = 7, counts[200] = 9;
    served["layers"].push_back({{"layer", l}, {"balancedness", 1}, {"counts", counts}});
  }
  const RoutingStatistics routing(r1, served.dump(), "s.json");
  EXPECT_FALSE(routing.uniform());
  EXPECT_DOUBLE_EQ(routing.share(5, 5), 7 / 256.0);
  EXPECT_DOUBLE_EQ(routing.share(5, 200), 9 / 256.0);
  EXPECT_DOUBLE_EQ(routing.share(5, 6), 8 / 256.0);
  const auto refusal = [&](const nlohmann::json& json) {
    return error_of([&] { RoutingStatistics(r1, json.dump(), "s.json"); });
  };
  nlohmann::json wrong = served;
  wrong["layers"][4].erase("counts");
  EXPECT_TRUE(says(refusal(wrong), "s.json: an element of layers has no layer or no counts"));
  wrong = served;
  wrong["layers"].erase(7);
  EXPECT_TRUE(says(refusal(wrong), "s.json: layers has 11, and layer 10 of the model follows"));
  wrong = served;
  while (wrong["layers"].size() > 57) wrong["layers"].erase(57);
  EXPECT_TRUE(says(refusal(wrong), "counts of 57 layers, and 58 have experts"));
  wrong = served;
  wrong.erase("tokens");
  EXPECT_TRUE(says(refusal(wrong), "tokens")) << refusal(wrong);
}

// Link and CPU end together; four experts are sent before the router has run.
TEST_F(LayerTimeOfR1, AStreamedChunksExpertsAreDivided) {
  p.stream_from_tokens = 2000;
  const StepShape chunk = {4096, 4096, true, 1};
  const LayerTime t = LayerModel(in, p, chunk).layer(p.stages[0], 3, &p.layers[0]);
  p.stream_from_tokens = 5000;
  const LayerTime here = LayerModel(in, p, chunk).layer(p.stages[0], 3, &p.layers[0]);
  EXPECT_EQ(here[Part::kStreaming], 0);
  const double used = 256 * chance_of_use(8.0 / 256, 4096), bytes = used * 44'050'944;
  const double link = bytes / 10e9, copy = 3 * bytes / 100e9, cpu = here[Part::kCpuExperts];
  const double brought = t[Part::kStreaming] / link;
  EXPECT_GT(brought, 0.5);
  EXPECT_LT(brought, 0.9);
  EXPECT_NEAR(t[Part::kCpuExperts], (1 - brought) * cpu + brought * copy, 1e-9);
  const double router =
      t[Part::kProjections] + t[Part::kAttention] + t[Part::kRouter] + t[Part::kOverhead];
  EXPECT_NEAR(t.seconds, router + t[Part::kStreaming] - 4 / used * link, 1e-9);
  EXPECT_NEAR(t.seconds, router + t[Part::kExchange] + t[Part::kCpuExperts], 1e-9);
  EXPECT_LT(t.seconds, here.seconds);
  EXPECT_LT(t[Part::kGpuExperts] + t[Part::kShared], t[Part::kStreaming]);
  // With few tokens, copying an expert takes the CPU longer than computing it.
  p.stream_from_tokens = 1;
  const LayerTime few = LayerModel(in, p, {32, 32, true, 1}).layer(p.stages[0], 3, &p.layers[0]);
  EXPECT_EQ(few[Part::kStreaming], 0);
  // No GPU kernel reads this format.
  p.layers[0].groups[0].format = {DType::kI8};
  EXPECT_EQ(LayerModel(in, p, chunk).layer(p.stages[0], 3, &p.layers[0])[Part::kStreaming], 0);
}

// A dense layer overlaps nothing: both micro-batches take their time, one after the other.
TEST_F(LayerTimeOfR1, MicroBatchesOfADenseLayerAddUp) {
  const LayerTime half = LayerModel(in, p, {16, 1024, false, 1}).layer(p.stages[0], 0, nullptr);
  p.micro_batches = 2;
  const LayerTime both = LayerModel(in, p, {32, 1024, false, 1}).layer(p.stages[0], 0, nullptr);
  EXPECT_GT(half.seconds, 0);
  EXPECT_DOUBLE_EQ(both.seconds, 2 * half.seconds);
  EXPECT_DOUBLE_EQ(both[Part::kAttention], 2 * half[Part::kAttention]);
}

// Two hosts of two ranks, each with experts and backbone: a row and a sum cross once, and the GPUs
// of a host send a row once to each other. CPUs, one a host, send the same.
TEST(LayerTime, ARowCrossesOnceToEachHost) {
  const ModelConfig r1 = known_model("r1");
  Machine m = round_machine();
  m.gpus[0].memory_bytes = 1'000'000'000'000;
  m.gpus.push_back(m.gpus[0]);
  m.hosts = 2;
  m.network = {1e9, 7e-6};
  m.gpu_link = {100e9, 5e-6};
  const RoutingStatistics routing(r1);
  const Workload w;
  const PlanInput in = {r1, m, w, routing};
  const auto exchange = [&](const std::vector<DeviceId>& devices, ExpertRows rows, double tokens) {
    Placement p;
    p.expert_rows = rows;
    p.backbone = {DType::kF8E4M3};
    p.stages = {{0, 60, devices, 1}};
    LayerExperts layer = {3, 60, {}};
    const auto n = static_cast<int>(devices.size());
    for (int i = 0; i < n; ++i) {
      layer.groups.push_back({{}, {DType::kF8E4M3}, {devices[i]}});
      for (int e = 256 / n * i; e < 256 / n * (i + 1); ++e) layer.groups[i].experts.push_back(e);
    }
    p.layers = {layer};
    return LayerModel(in, p, {tokens, 1024, false, 1. * n})
        .layer(p.stages[0], 3, &p.layers[0])[Part::kExchange];
  };
  const std::vector<DeviceId> gpus = {{0, 0}, {0, 1}, {1, 0}, {1, 1}}, cpus = {{0, -1}, {1, -1}};
  const auto slow = ExpertRows::kExact, fast = ExpertRows::kFp8;
  const double crosses = 1 - std::pow(0.5, 8), to_gpu = 1 - std::pow(0.75, 8);
  const auto expect = [&](double got, double latency, double rows, double row, double rate) {
    EXPECT_NEAR(got, 2 * latency + rows * row / rate, 1e-12);
  };
  const double exact = 7168 * (2 + 4), fp8 = 7392 + 14336, fp8_to_floats = 7392 + 28672;
  expect(exchange(gpus, slow, 33), 7e-6, 2 * 33 * crosses, exact, 1e9);
  expect(exchange(gpus, fast, 33), 7e-6, 2 * 33 * crosses, fp8, 1e9);
  expect(exchange(cpus, slow, 32), 7e-6, 32 * crosses, exact, 1e9);
  expect(exchange(cpus, fast, 32), 7e-6, 32 * crosses, fp8, 1e9);
  // Rows of recorded steps go to all hosts, and their sums come as floats.
  expect(exchange(gpus, slow, 32), 7e-6, 2 * 32, exact, 1e9);
  expect(exchange(gpus, fast, 32), 7e-6, 2 * 32, fp8_to_floats, 1e9);
  // Hosts of one GPU each have no second level.
  expect(exchange({{0, 0}, {1, 0}}, fast, 32), 7e-6, 32 * crosses, fp8, 1e9);
  m.gpu_link.bytes_per_second = 0.5e9;
  for (const double n : {32., 33.}) {
    expect(exchange(gpus, slow, n), 5e-6, 3 * n * to_gpu, exact, 0.5e9);
    expect(exchange(gpus, fast, n), 5e-6, 3 * n * to_gpu, fp8_to_floats, 0.5e9);
  }
}

// Two ranks, each with experts and backbone, and even routing: half of a rank's rows stay on it,
// and a token whose eight experts are all there has nothing to send.
TEST(LayerTime, ExpertParallelByHand) {
  const ModelConfig r1 = known_model("r1");
  Machine m = round_machine();
  m.gpus[0].memory_bytes = 1'000'000'000'000;
  m.gpus.push_back(m.gpus[0]);
  m.gpu_link = {100e9, 5e-6};
  const RoutingStatistics routing(r1);
  const Workload w;
  const PlanInput in = {r1, m, w, routing};
  Placement p;
  p.backbone = {DType::kF8E4M3};
  p.stages = {{0, 60, {{0, 0}, {0, 1}}, 1}};
  ExpertGroup a = {{}, {DType::kF8E4M3}, {{0, 0}}}, b = {{}, {DType::kF8E4M3}, {{0, 1}}};
  for (int e = 0; e < 256; ++e) (e < 128 ? a : b).experts.push_back(e);
  p.layers = {{3, 60, {a, b}}};
  const LayerTime t = LayerModel(in, p, {32, 1024, false, 2}).layer(p.stages[0], 3, &p.layers[0]);
  EXPECT_NEAR(t[Part::kExchange], 10e-6 + 32 * (1 - std::pow(0.5, 8)) * (14'336 + 28'672) / 100e9,
              1e-12);
  // 64 tokens, 128 experts a rank; the load of the busier rank is the larger of two normal draws.
  const double chance = 1 - std::pow(1 - 8.0 / 256, 64), mean = 128 * chance;
  const double used = mean + std::sqrt(2 * mean * (1 - chance) * std::log(2.0));
  const double rows = 256 + std::sqrt(2 * 256 * std::log(2.0));
  EXPECT_NEAR(t[Part::kGpuExperts],
              used * 44'050'944 / 1e12 /
                  product_ratio("gpu", Product::kExperts, DType::kF8E4M3, rows / used),
              1e-9);
  EXPECT_NEAR(t.seconds,
              t[Part::kProjections] + t[Part::kAttention] + t[Part::kRouter] + t[Part::kShared] +
                  t[Part::kOverhead] + t[Part::kExchange] + t[Part::kGpuExperts],
              1e-12);
  // With two micro-batches the busiest resource runs twice, with half of the tokens each time.
  p.micro_batches = 2;
  const LayerTime two = LayerModel(in, p, {32, 1024, false, 2}).layer(p.stages[0], 3, &p.layers[0]);
  const LayerTime half = [&] {
    Placement one = p;
    one.micro_batches = 1;
    return LayerModel(in, one, {16, 1024, false, 2}).layer(p.stages[0], 3, &p.layers[0]);
  }();
  EXPECT_NEAR(two.seconds, std::max(half.seconds, 2 * (half.seconds - half[Part::kExchange])),
              1e-12);
  // With fewer sequences than the threshold there is one micro-batch.
  p.micro_batches_from_sequences = 33;
  EXPECT_EQ(LayerModel(in, p, {32, 1024, false, 2}).layer(p.stages[0], 3, &p.layers[0]).seconds,
            t.seconds);
}

// R1's rows of 7168 are summed by all GPUs of a tensor-parallel group: over the link within a host
// if one host has the group, whatever the number of hosts of the stage, otherwise over a share of
// the network.
TEST(LayerTime, AllReduceByHand) {
  const ModelConfig r1 = known_model("r1");
  Machine m = round_machine();
  m.hosts = 2;
  m.gpus.push_back(m.gpus[0]);
  m.gpu_link = {100e9, 5e-6};
  m.network = {10e9, 20e-6};
  const RoutingStatistics routing(r1);
  const Workload w;
  const PlanInput in = {r1, m, w, routing};
  const auto all_reduce = [&](const std::vector<DeviceId>& devices, int tp) {
    Placement p = r1_with_experts_on_the_cpu();
    p.stages = {{0, 60, devices, tp}};
    return LayerModel(in, p, {32, 1024, false, 1}).backbone(p.stages[0], 3)[Part::kAllReduce];
  };
  const double rows = 32 * 7168 * 2;  // bytes
  const std::vector<DeviceId> one_host = {{0, 0}, {0, 1}};
  const std::vector<DeviceId> two_hosts = {{0, 0}, {0, 1}, {1, 0}, {1, 1}};
  EXPECT_EQ(all_reduce(two_hosts, 1), 0);
  const double near = 2 * (2 * 5e-6 + rows / 100e9);
  EXPECT_NEAR(all_reduce(one_host, 2), near, 1e-12);
  EXPECT_NEAR(all_reduce(two_hosts, 2), near, 1e-12) << "two replicas, a host each";
  EXPECT_NEAR(all_reduce(two_hosts, 4), 2 * (2 * 20e-6 + 1.5 * rows / (10e9 / 2)), 1e-12);
  EXPECT_NEAR(all_reduce({{0, -1}, {1, -1}}, 2), 2 * (2 * 20e-6 + 2 * rows / 10e9), 1e-12)
      << "CPUs add floats";
}

// Two hosts with CPUs alone divide R1's backbone, and their experts get no rows over the network.
TEST(PlanOfCpuHosts, TheBackboneIsDivided) {
  Machine m = round_machine();
  m.gpus.clear();
  m.hosts = 2;
  m.network = {10e9, 5e-6};
  const Planned planned("r1", m);
  const Plan plan = planned.plan();
  ASSERT_EQ(plan.placement.stages.size(), 1u);
  EXPECT_EQ(plan.placement.stages[0].devices, (std::vector<DeviceId>{{0, -1}, {1, -1}}));
  EXPECT_EQ(plan.placement.stages[0].tp, 2);
  const Workload w;
  const PlanInput in = {planned.config, m, w, planned.routing};
  const auto layer = [&](Placement p, std::vector<DeviceId> devices, int tp) {
    p.stages = {{0, 60, std::move(devices), tp}};
    return LayerModel(in, p, {1, 1024, false, 1}).layer(p.stages[0], 3, experts_of_layer(p, 3));
  };
  const LayerTime divided = layer(plan.placement, {{0, -1}, {1, -1}}, 2);
  const LayerTime on_one = layer(plan.placement, {{0, -1}}, 1);
  EXPECT_EQ(divided[Part::kExchange], 0);
  EXPECT_GT(on_one[Part::kExchange], 0);
  EXPECT_DOUBLE_EQ(divided[Part::kProjections] * 2, on_one[Part::kProjections]);
  // The busier host has more than half of the experts, wherever the backbone is.
  EXPECT_DOUBLE_EQ(divided[Part::kCpuExperts], on_one[Part::kCpuExperts]);
  Placement alone = plan.placement;
  for (ExpertGroup& group : alone.layers[0].groups) group.owners = {{0, -1}};
  const double all = layer(alone, {{0, -1}}, 1)[Part::kCpuExperts];
  EXPECT_GT(divided[Part::kCpuExperts], 0.55 * all);
  EXPECT_LT(divided[Part::kCpuExperts], 0.85 * all);
}

}  // namespace
}  // namespace tandem
