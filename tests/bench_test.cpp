// Counts of `tandem bench` against numbers computed by hand, and every measurement at small sizes.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "bench/benchmark.h"
#include "bench/random_inputs.h"
#include "core/machine_info.h"
#include "cpu_kernels/line_instructions.h"
#include "cpu_kernels/tables.h"
#include "engine/step_runner.h"
#include "io/machine_json.h"
#include "model/cost.h"
#include "model/kv_layout.h"
#include "model/parameters.h"
#include "offload/cpu_experts.h"
#include "offload/routing_recorder.h"
#include "ops/cpu_ops.h"
#include "tests/error_of.h"
#include "tests/fake_checkpoint.h"
#include "tests/small_config.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kReadBytes = 8 << 20;
constexpr double kSeconds = 0.002;

std::string small_config_json() {
  return R"({"architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 256, "vocab_size": 512,
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_layer_freq": 1, "intermediate_size": 384,
    "moe_intermediate_size": 128, "n_shared_experts": 1, "n_routed_experts": 32, "num_experts_per_tok": 4,
    "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax",
    "norm_topk_prob": false, "routed_scaling_factor": 1.0, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": null, "kv_lora_rank": 128, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "hidden_act": "silu", "tie_word_embeddings": false, "eos_token_id": 1})";
}

TEST(BenchCounts, BytesAndOperationsOfExperts) {
  const ModelConfig r1 = bench_config("r1");
  // gate and up [2048, 7168], down [7168, 2048]; each has 16 x 56 scales.
  EXPECT_EQ(routed_expert_bytes(r1, {DType::kF8E4M3}), 3 * (14'680'064 + 896 * 4));
  EXPECT_EQ(routed_expert_bytes(r1, {DType::kBF16}), 88'080'384);
  EXPECT_EQ(routed_expert_bytes(r1, {DType::kI8}), 44'040'192 + (2048 + 2048 + 7168) * 4);
  EXPECT_EQ(routed_expert_bytes(r1, {DType::kI4, 128}), 22'020'096 + 344'064 * 2);
  const ModelConfig lite = bench_config("v2-lite");
  EXPECT_EQ(routed_expert_bytes(lite, {DType::kBF16}), 17'301'504);
  // A matrix has 1408 / 128 = 11 by 2048 / 128 = 16 blocks.
  EXPECT_EQ(routed_expert_bytes(lite, {DType::kF8E4M3}), 3 * (2'883'584 + 176 * 4));

  int32_t ids[] = {0, 1, 2, 3, 4, 5, 6, 7, 7, 6, 5, 4, 3, 2, 1, 8};
  const TensorView two{ids, 2, 8, 8, DType::kI32};
  const ExpertsCost one = cost_of_experts(r1, {DType::kF8E4M3}, two.rows_from(0, 1));
  EXPECT_EQ(one.n_experts, 8);
  EXPECT_EQ(one.bytes, 352'407'552);
  EXPECT_EQ(one.ops, 704'643'072);
  const ExpertsCost both = cost_of_experts(r1, {DType::kF8E4M3}, two);
  EXPECT_EQ(both.n_experts, 9) << "an expert of two tokens is read once";
  EXPECT_EQ(both.bytes, 396'458'496);
  EXPECT_EQ(both.ops, 1'409'286'144);
}

TEST(BenchCounts, BytesAndOperationsOfExpertsBeyondTwoBillion) {
  const ModelConfig r1 = bench_config("r1");
  std::vector<int32_t> ids(64 * 8);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i % 256);
  const ExpertsCost cost =
      cost_of_experts(r1, {DType::kF8E4M3}, {ids.data(), 64, 8, 8, DType::kI32});
  EXPECT_EQ(cost.n_experts, 256);
  EXPECT_EQ(cost.bytes, int64_t{256} * 44'050'944);
  EXPECT_EQ(cost.ops, int64_t{512} * 88'080'384);
}

// Per 64 bytes, as counted for 1, 2 and 4 rows, and half-way between 16 and 32.
TEST(BenchCounts, InstructionsOfExperts) {
  const cpu::KernelTable avx2 = table_of(cpu::Isa::kAvx2, {}),
                         avx512 = table_of(cpu::Isa::kAvx512, {.avx512_bf16 = true}),
                         without_bf16 = table_of(cpu::Isa::kAvx512, {}),
                         amx = table_of(cpu::Isa::kAmx, {.avx512_bf16 = true});
  using cpu::WeightType;
  EXPECT_EQ(cpu::instructions_of_line(avx2, WeightType::kBF16, 0, 1), 20.4);
  EXPECT_EQ(cpu::instructions_of_line(avx2, WeightType::kBF16, 0, 4), 47.4);
  EXPECT_DOUBLE_EQ(cpu::instructions_of_line(avx2, WeightType::kBF16, 0, 24), (150.0 + 290.2) / 2);
  EXPECT_DOUBLE_EQ(cpu::instructions_of_line(avx2, WeightType::kBF16, 0, 256), 2 * 1137.0);
  EXPECT_EQ(cpu::instructions_of_line(avx2, WeightType::kF16, 0, 1), 0) << "not counted";
  EXPECT_EQ(cpu::instructions_of_line(avx2, WeightType::kI4TwoLevel, 128, 1), 0) << "other groups";
  EXPECT_EQ(cpu::instructions_of_line(avx512, WeightType::kBF16, 0, 4), 4.1);
  EXPECT_EQ(cpu::instructions_of_line(without_bf16, WeightType::kBF16, 0, 4), 0) << "as floats";
  EXPECT_EQ(cpu::instructions_of_line(without_bf16, WeightType::kI8, 0, 4), 4.1);
  EXPECT_EQ(cpu::instructions_of_line(amx, WeightType::kF8E4M3, 0, 32), 7.2);
  const bool vnni = cpu::cpu_has(cpu::Feature::kAvxVnni);
  EXPECT_EQ(cpu::instructions_of_line(avx2, WeightType::kI8, 0, 1), vnni ? 0 : 22.4);

  // Seven experts with two tokens each, two with one; an FP8 expert has 688,296 whole lines.
  const ModelConfig r1 = bench_config("r1");
  int32_t ids[] = {0, 1, 2, 3, 4, 5, 6, 7, 7, 6, 5, 4, 3, 2, 1, 8};
  const TensorView two{ids, 2, 8, 8, DType::kI32};
  EXPECT_EQ(instructions_of_experts(r1, {DType::kF8E4M3}, two, avx2),
            std::llround(688'296 * (7 * 63.8 + 2 * 40.2)));
  EXPECT_EQ(instructions_of_experts(r1, {DType::kF8E4M3}, two, avx512),
            std::llround(688'296 * (7 * 9.2 + 2 * 7.1)));
  EXPECT_EQ(instructions_of_experts(r1, {DType::kF8E4M3}, two, without_bf16), 0);
}

TEST(BenchCounts, BytesAndOperationsOfAttention) {
  const ModelConfig r1 = bench_config("r1");
  const Cost decode = cost_of_absorbed(r1.mla, 16384, 1, 2);
  EXPECT_EQ(decode.bytes, 18'874'368);   // 1,152 a token
  EXPECT_EQ(decode.ops, 4'563'402'752);  // 278,528 a token
  // Tokens 3 and 4 of 4 see 3 + 4 keys; 128 heads of 192 + 128, keys and values of 4 restored.
  const Cost prefill = cost_of_naive(r1.mla, 4, 2, 2, 1000);
  EXPECT_EQ(prefill.bytes, 4 * 1152 + 1000);
  EXPECT_EQ(prefill.ops, 2 * (7 * 128 * 320 + int64_t{4} * 512 * 128 * 256));
}

TEST(BenchCounts, ATokenReadsWhatTheParameterCountSays) {
  for (const char* name : {"r1", "v2-lite", "k2", "moonlight"}) {
    const ModelConfig c = bench_config(name);
    const CostOfParts cost = cost_of_step(c, {{DType::kBF16}, {DType::kBF16}}, {100, 1}, 2);
    const ParameterCounts counts = count_parameters(c);
    EXPECT_EQ(cost.attention.bytes, 100 * kv_bytes_per_token(c)) << name;
    // Vectors are stored as float; one row of the embedding is read.
    const int64_t vectors =
        (cost.matrices.bytes + cost.experts.bytes - 2 * c.dim - 2 * counts.activated) / 2;
    EXPECT_EQ(cost.matrices.ops + cost.experts.ops, 2 * (counts.activated - vectors)) << name;
    EXPECT_GT(vectors, counts.norms) << name;
    EXPECT_LT(vectors, counts.activated / 1000) << name;
  }
  // 58 MoE layers with 8 experts a token.
  const ModelConfig r1 = bench_config("r1");
  const WeightFormats fp8 = {{DType::kF8E4M3}, {DType::kF8E4M3}};
  const CostOfParts one = cost_of_step(r1, fp8, {1000, 1}, 2),
                    two = cost_of_step(r1, fp8, {1000, 2}, 2);
  EXPECT_EQ(one.experts.bytes, int64_t{58} * 352'407'552);
  // Two tokens choose 15.75 experts on average. Matrices are read once, each sequence's cache is
  // read.
  EXPECT_EQ(two.experts.bytes, one.experts.bytes / 32 * 63);
  EXPECT_EQ(two.matrices.bytes, one.matrices.bytes + 7168 * 2);
  EXPECT_EQ(two.attention.bytes, 2 * one.attention.bytes);
  EXPECT_EQ(two.matrices.ops, 2 * one.matrices.ops);
  // A draft is a token like that of another sequence, but its sequence's cache is read once.
  const CostOfParts drafted = cost_of_step(r1, fp8, {1000, 1, 1}, 2);
  EXPECT_EQ(drafted.experts.bytes, two.experts.bytes);
  EXPECT_EQ(drafted.matrices.bytes, two.matrices.bytes);
  EXPECT_EQ(drafted.matrices.ops, two.matrices.ops);
  EXPECT_EQ(drafted.attention.bytes, one.attention.bytes);
  EXPECT_EQ(drafted.attention.ops, two.attention.ops);
}

TEST(BenchModel, AsManyExpertsAsFit) {
  const ModelConfig r1 = bench_config("r1");
  const int64_t bytes = routed_expert_bytes(r1, {DType::kF8E4M3});
  Resident r = resident_experts(r1, {DType::kF8E4M3}, 43 * bytes, 0);
  EXPECT_EQ(r.experts, 40) << "a multiple of 8 groups";
  EXPECT_EQ(r.layers, 1);
  r = resident_experts(r1, {DType::kF8E4M3}, 10'000 * bytes, 300 * bytes);
  EXPECT_EQ(r.experts, 256);
  EXPECT_EQ(r.layers, 2) << "one layer is less than is to be cold";
  r = resident_experts(r1, {DType::kF8E4M3}, 300 * bytes, 1000 * bytes);
  EXPECT_EQ(r.layers, 1) << "no more than the budget";
  EXPECT_NE(
      error_of([&] { resident_experts(r1, {DType::kF8E4M3}, 15 * bytes, 0); }).find("--memory"),
      std::string::npos);
}

TEST(BenchModel, RandomWeightsGiveFiniteNumbers) {
  const ModelConfig config = small_r1();
  for (const char* name : {"fp8", "bf16", "fp16", "fp32", "int8", "int4", "int4-32", "int4-128"}) {
    const WeightFormat format = weight_format(name);
    EXPECT_EQ(format_name(format), name);
    const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
    Team team(0);
    CpuWeights home(kernels);
    const ModelWeights weights = random_weights(
        config, {{DType::kF8E4M3}, format}, [](const WeightSpec&) { return true; }, home, team);
    // The random experts are byte-wise copies of one expert.
    const auto bytes_of = [&](int expert) {
      const TensorView& q = weights.layers[1].experts[expert].gate.q;
      return std::string_view(reinterpret_cast<const char*>(q.row_data(0)),
                              static_cast<size_t>(q.rows * q.row_bytes()));
    };
    for (int e = 1; e < config.router.n_experts; ++e) EXPECT_EQ(bytes_of(e), bytes_of(0)) << e;
    CpuExperts experts(kernels, config, weights, 1, team);
    std::vector<float> x(config.dim, 1.f), y(config.dim, 0.f), w(config.router.n_active, 0.25f);
    std::vector<int32_t> ids = {0, 5, 17, 31};
    const int active = config.router.n_active;
    const Ticket ticket = experts.submit({1,
                                          {x.data(), 1, config.dim, config.dim, DType::kF32},
                                          {{ids.data(), 1, active, active, DType::kI32},
                                           {w.data(), 1, active, active, DType::kF32}}});
    experts.add_to(ticket, {y.data(), 1, config.dim, config.dim, DType::kF32});
    double squares = 0;
    for (const float v : y) squares += v * v;
    EXPECT_TRUE(std::isfinite(squares)) << name;
    EXPECT_GT(squares, 0) << name;
    EXPECT_LT(squares, 100 * config.dim) << name;
  }
}

// The planner and the counts of bytes assume independent choices, although attention makes the
// tokens of a prompt similar.
TEST(BenchModel, TokensOfAPromptChooseTheirExpertsIndependently) {
  constexpr int kTokens = 16, kPrompts = 8;
  const ModelConfig config = small_r1();
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  Team team(0);
  CpuWeights home(kernels);
  const ModelWeights weights = random_weights(
      config, {{DType::kBF16}, {DType::kBF16}}, [](const WeightSpec&) { return true; }, home, team);
  CpuOps ops(kernels, config, kTokens, team);
  CpuExperts experts(kernels, config, weights, kTokens, team);
  KvCache cache(config, kTokens, cache_type_for(kernels));
  const std::vector<int32_t> pages = first_pages(pages_for(kTokens));
  LastTokens last(kTokens, kTokens, pages);
  std::mt19937 rng(1);
  double used = 0;
  for (int i = 0; i < kPrompts; ++i) {
    RoutingRecorder recorder(config);
    experts.observe(&recorder);
    CpuDevice device(team);
    StepRunner model({config, weights, device, ops, experts}, {kTokens, 1}, AttentionForm::kAuto);
    last.tokens = random_tokens(kTokens, config.vocab, rng);
    model.forward(last.batch(), cache, {});
    for (const int64_t n : recorder.counts().of_layer.back()) used += n > 0 ? 1 : 0;
  }
  EXPECT_NEAR(used / kPrompts, expected_experts(config.router, kTokens), 1);
}

TEST(BenchRoofline, TheSlowerOfReadingAndComputing) {
  const Bounds bounds{.read_bytes_per_second = 100, .ops_per_second = 1000};
  EXPECT_EQ(bounds.seconds({.bytes = 200, .ops = 1000}), 2);
  EXPECT_EQ(bounds.seconds({.bytes = 100, .ops = 5000}), 5);
}

TEST(BenchRoofline, RunsAreNumbered) {
  Team team(1);
  MachineSpeed speed(team, kReadBytes);
  std::vector<int64_t> runs;
  const Work work{{1000, 1000}, [&](int64_t i) { runs.push_back(i); }};
  const Measured m = measure(speed, speed.peak_loops()[0], {&work, 1}, kSeconds)[0];
  for (size_t i = 0; i < runs.size(); ++i) ASSERT_EQ(runs[i], static_cast<int64_t>(i));
  EXPECT_GE(runs.size(), 3u);
  EXPECT_GT(m.seconds, 0);
  EXPECT_GT(m.bounds.read_bytes_per_second, 0);
}

// Parts of one measurement are computed one after another, so their rooflines are added.
TEST(BenchRoofline, PartsFollowOneAnother) {
  Team team(1);
  MachineSpeed speed(team, kReadBytes);
  const auto spin = [](int64_t) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
    while (std::chrono::steady_clock::now() < end) {
    }
  };
  constexpr int64_t kMuch = 1'000'000;
  const Work works[] = {{{kMuch, 0}, spin}, {{kMuch, 0}, spin, std::vector<Cost>(100, {kMuch, 0})}};
  std::vector<double> ratios;  // other programs may interrupt one of them
  for (int i = 0; i < 5; ++i) {
    const auto measured = measure(speed, speed.peak_loops()[0], works, kSeconds);
    ratios.push_back(measured[1].roofline_ratio / measured[0].roofline_ratio);
  }
  const double more = median(ratios);
  EXPECT_GT(more, 10);
  EXPECT_LT(more, 1000);
}

void expect_consistent(const Json& row) {
  EXPECT_GT(row["seconds"], 0);
  EXPECT_GT(row["bytes"], 0);
  EXPECT_GT(row["ops"], 0);
  const double roofline =
      std::max(row["bytes"].get<double>() / row["read_bytes_per_second"].get<double>(),
               row["ops"].get<double>() / row["peak_ops_per_second"].get<double>());
  const double seconds = row["seconds"], ratio = row["roofline_ratio"];
  EXPECT_DOUBLE_EQ(row["roofline_seconds"], ratio * seconds);
  // The ratio is a median of quotients and is compared with a quotient of medians, over a few runs
  // of microseconds on a shared machine.
  EXPECT_GT(ratio, roofline / seconds / 100);
  EXPECT_LT(ratio, roofline / seconds * 100);
  EXPECT_GE(row["unhidden_ratio"], ratio * (1 - 1e-9));
  EXPECT_LE(row["unhidden_ratio"], 2 * ratio * (1 + 1e-9)) << "the shorter is not longer";
}

TEST(BenchRows, Experts) {
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  Team team(0);
  MachineSpeed speed(team, kReadBytes);
  std::vector<Json> rows;
  experts_benchmark().on_cpu({.options = {.tokens = {1, 64}, .skew = true, .seconds = kSeconds},
                              .config = small_r1(),
                              .formats = {{DType::kBF16}, {DType::kF8E4M3}},
                              .memory_bytes = 16 << 20},
                             kernels, speed, [&](const Json& row) { rows.push_back(row); });
  ASSERT_EQ(rows.size(), 4u);
  for (const Json& row : rows) {
    expect_consistent(row);
    EXPECT_EQ(row["format"], "fp8");
    EXPECT_EQ(row["isa"], kernels.name);
    EXPECT_EQ(row["ops"], 2 * 3 * 4 * 256 * 128 * row["tokens"].get<int64_t>());
  }
  EXPECT_EQ(rows[0]["tokens"], 1);
  EXPECT_EQ(rows[0]["rows_per_expert"], 1);
  EXPECT_EQ(rows[0]["bytes"], 4 * 3 * (256 * 128 + 2 * 4));
  EXPECT_EQ(rows[2]["routing"], "uniform");
  EXPECT_EQ(rows[2]["rows_per_expert"], 8) << "all 32 experts";
  EXPECT_EQ(rows[3]["routing"], "skewed");
  EXPECT_EQ(rows[3]["rows_of_busiest_expert"], 32) << "half of the tokens";
  EXPECT_LT(rows[2]["rows_of_busiest_expert"], 24);
  EXPECT_GT(rows[3]["seconds_over_uniform"], 0);
}

TEST(BenchRows, MlpAndAttention) {
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::best_isa());
  Team team(0);
  MachineSpeed speed(team, kReadBytes);
  std::vector<Json> rows;
  const auto keep = [&](const Json& row) { rows.push_back(row); };
  mlp_benchmark().on_cpu({.options = {.tokens = {1, 40}, .seconds = kSeconds},
                          .config = small_r1(),
                          .formats = {{DType::kF8E4M3}, {DType::kF8E4M3}},
                          .memory_bytes = 4 << 20},
                         kernels, speed, keep);
  ASSERT_EQ(rows.size(), 6u);
  EXPECT_EQ(rows[0]["bytes"], 3 * (256 * 384 + 6 * 4));
  EXPECT_EQ(rows[3]["ops"], 2 * 3 * 256 * 384 * 40);
  attention_benchmark().on_cpu(
      {.options = {.tokens = {128}, .contexts = {100, 200}, .batches = {1, 3}, .seconds = kSeconds},
       .config = small_r1(),
       .memory_bytes = 4 << 20},
      kernels, speed, keep);
  ASSERT_EQ(rows.size(), 11u) << "a prompt of 128 tokens does not fit a context of 100";
  EXPECT_EQ(rows[6]["context"], 100);
  EXPECT_EQ(rows[6]["bytes"], 100 * 144 * 2);
  EXPECT_EQ(rows[7]["tokens"], 3);
  EXPECT_EQ(rows[7]["bytes"], 3 * 100 * 144 * 2) << "each its own";
  for (const Json& row : rows) expect_consistent(row);
}

TEST(BenchRows, SequencesHaveTheirOwnPages) {
  const std::vector<int32_t> pages = {7, 5, 3, 2, 1, 0};
  const LastTokens last(100, 2, pages, 3);
  const Batch batch = last.batch();
  EXPECT_EQ(last.positions, (std::vector<int32_t>{98, 99, 98, 99, 98, 99}));
  ASSERT_EQ(batch.sequences.size(), 3u);
  EXPECT_EQ(batch.sequences[1].kv_pages[0], 3);
  EXPECT_EQ(batch.sequences[2].kv_pages[1], 0);
  EXPECT_EQ(batch.sequences[2].kv_pages.size(), 2u);
}

struct Output {
  int status;
  std::string out, error;
};

Output tandem_bench(const std::string& arguments) {
  const std::string errors = testing::TempDir() + "bench_test_errors.txt";
  FILE* pipe = popen((TANDEM_BINARY " bench " + arguments + " 2>" + errors).c_str(), "r");
  Output result{};
  for (int c; (c = std::fgetc(pipe)) != EOF;) result.out += static_cast<char>(c);
  result.status = WEXITSTATUS(pclose(pipe));
  std::ifstream file(errors);
  result.error.assign(std::istreambuf_iterator<char>(file), {});
  return result;
}

TEST(BenchCommand, OneJsonObjectARow) {
  const std::string config = testing::TempDir() + "bench_test_config.json";
  std::ofstream(config) << small_config_json();
  const Output r = tandem_bench("experts --config " + config +
                                " --tokens 1,2 --memory 0.05 --seconds 0.01 --json");
  ASSERT_EQ(r.status, 0) << r.error;
  const size_t end = r.out.find('\n');
  for (const std::string& line : {r.out.substr(0, end), r.out.substr(end + 1)}) {
    const Json row = Json::parse(line);
    EXPECT_EQ(row["format"], "bf16") << "the checkpoint's own";
    for (const char* key : {"isa", "tokens", "rows_per_expert", "seconds", "bytes", "ops",
                            "roofline_seconds", "roofline_ratio"})
      EXPECT_TRUE(row.contains(key)) << key;
  }
  const Output text = tandem_bench("machine --memory 0.05 --seconds 0.001");
  EXPECT_NE(text.out.find("reading memory"), std::string::npos) << text.out;
}

TEST(BenchCommand, RefusesInOneLine) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "subcommand"},
      {"everything", "subcommand"},
      {"experts --config r9", "r9"},
      {"experts --experts int3", "int3"},
      {"mlp --format q4", "q4"},
      {"mlp --format int4", "int4"},
      {"experts --tokens 0", "--tokens 0"},
      {"experts --tokens 1,-5", "--tokens -5"},
      {"experts --tokens one", "one"},
      {"machine --threads 100000", "100000"},
      {"experts --isa sse9", "sse9"},
      {"machine --seconds 0", "--seconds 0"},
      {"machine --memory 1000000", "--memory"},
      {"experts --memory 0.1", "do not fit"},
      {"attention --memory 0.001 --ctx 16384", "--ctx 16384"},
      {"generate --layers 0", "--layers 0"},
      {"generate --layers 999", "--layers"},
      {"generate --ctx 16777216 --memory 1", "--ctx"},
      {"generate -n 1", "-n 1"},
      {"generate --batch 0", "--batch 0"},
      {"embed --memory 0.5", "--memory"},
      {"layer --layers 0", "--layers 0"},
      {"moe --layers 9 --memory 1", "--memory"},
      {"mlp --plot /no/such/folder/a.svg", "/no/such/folder/a.svg"},
  };
  for (const auto& [arguments, part] : cases) {
    const Output r = tandem_bench(arguments);
    EXPECT_EQ(r.status, 2) << arguments << r.error;
    EXPECT_EQ(r.out, "") << arguments;
    EXPECT_EQ(r.error.rfind("error: ", 0), 0u) << arguments << ": " << r.error;
    EXPECT_EQ(std::count(r.error.begin(), r.error.end(), '\n'), 1) << arguments << ": " << r.error;
    EXPECT_NE(r.error.find(part), std::string::npos) << arguments << ": " << r.error;
  }
}

}  // namespace
}  // namespace tandem
