// Benchmarks with a GPU, real or emulated, of a small model: every row has GPU times. The values of
// the times are not tested.
#include <gtest/gtest.h>

#include <thread>

#include "attention_variant_case.h"
#include "bench/gpu/gpu_benches.h"
#include "bench/self_test.h"
#include "gpu_kernels/runtime.h"
#include "ops/cuda_weights.h"
#include "tests/bench_rows.h"
#include "tests/config_families.h"
#include "tests/error_of.h"
#include "tests/small_config.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

ModelConfig tiny_config() {
  return ModelConfig::from_json(R"({
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128,
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2,
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": true, "routed_scaling_factor": 2.5,
    "vocab_size": 512, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "hidden_act": "silu", "tie_word_embeddings": false
  })",
                                "tiny");
}

constexpr double kSeconds = 1e-3;
constexpr int64_t kMemory = 1 << 28;
const WeightFormats kFormats = {{DType::kBF16}, {DType::kBF16}};

class GpuBench : public BenchRows {
 protected:
  const cpu::KernelTable kernels_ = cpu::kernels_for(cpu::best_isa());
  Team team_{1};
  MachineSpeed speed_{team_, 1 << 20};
  const ModelConfig config_ = tiny_config();
  const GpuBenchModels gpus_ = gpu_bench_models();

  BenchInput input(BenchOptions options) const {
    options.seconds = kSeconds;
    return {.options = std::move(options),
            .config = config_,
            .formats = kFormats,
            .memory_bytes = kMemory,
            .step_tokens = 16,
            .gpus = gpus_};
  }
  void measure(const Benchmark& benchmark, const BenchInput& bench) {
    benchmark.on_cpu(bench, kernels_, speed_, collect());
  }
};

TEST_F(GpuBench, Embed) {
  measure(embed_benchmark(), input({.tokens = {1, 5}}));
  expect_times_on_gpu(2);
  for (const Json& row : rows_) EXPECT_GT(row["cpu_to_gpu_seconds"].get<double>(), 0);
}

TEST_F(GpuBench, Mlp) {
  BenchInput bench = input({.tokens = {1, 20}});
  bench.memory_bytes = 400000;
  measure(mlp_benchmark(), bench);
  expect_times_on_gpu(6);
}

TEST_F(GpuBench, Experts) {
  BenchInput bench = input({.tokens = {1, 6}, .skew = true});
  bench.memory_bytes = 1 << 20;
  measure(experts_benchmark(), bench);
  expect_times_on_gpu(4);
}

TEST_F(GpuBench, MoeAndLayer) {
  const BenchInput bench = input({.tokens = {1, 6}, .contexts = {65}, .layers = 2});
  measure(moe_benchmark(), bench);
  expect_times_on_gpu(2);
  measure(layer_benchmark(), bench);
  expect_times_on_gpu(6);
}

TEST_F(GpuBench, Attention) {
  BenchInput bench = input({.tokens = {4}, .contexts = {65}, .batches = {1, 2}});
  bench.config.n_layers = 1;
  bench.memory_bytes = 1 << 20;
  measure(attention_benchmark(), bench);
  expect_times_on_gpu(3);
}

// Caches of 4096 tokens of 80 numbers in three layers or more take 2 MB, and the GPU has 1 MB.
TEST_F(GpuBench, AttentionInACacheThatTheGpuCannotHold) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "the memory of a GPU is what it is";
  BenchInput bench = input({.tokens = {4}, .contexts = {65}, .batches = {1}});
  bench.memory_bytes = 4 << 20;
  bench.options.context_limit = 4096;
  setenv("TANDEM_GPU_MEMORY", "1048576", 1);
  EXPECT_TRUE(says(error_of([&] { measure(attention_benchmark(), bench); }),
                   "--context-limit 4096 --batch 1: the caches of"));
  unsetenv("TANDEM_GPU_MEMORY");
  measure(attention_benchmark(), bench);
  expect_times_on_gpu(2);
  EXPECT_EQ(rows_.at(0)["context_limit"], 4096);
}

TEST_F(GpuBench, AttentionVariants) {
  BenchInput bench = input({.contexts = {65, 3}, .variants = true});
  bench.memory_bytes = 1 << 22;
  measure(attention_benchmark(), bench);
  expect_times_on_gpu(2 * kNumAttentionVariants);
}

// Runs on pages of a larger cache, with real products where the benchmark uses random matrices.
TEST_F(GpuBench, AttentionVariantsAgree) {
  const ModelConfig config = small_attention_config();
  const auto wanted = [](const WeightSpec& spec) { return spec.layer == 0; };
  CpuWeights home(kernels_);
  const ModelWeights weights = random_weights(config, kFormats, wanted, home, team_);
  const AttentionWeights& w = weights.layers[0].attn;
  const AttentionProducts products(kernels_, config, w, team_);
  constexpr int kContext = 150;
  const std::unique_ptr<GpuBenchModel> bench_model =
      gpus_({.config = config,
             .formats = kFormats,
             .wanted = wanted,
             .max_tokens = AttentionVariants::max_tokens(config.mla),
             .context = kContext});
  ASSERT_TRUE(bench_model);
  const auto matrix = [&](const TensorView& floats) {
    const Arena memory(Buffer(Arena::padded_bytes(floats.rows * floats.cols * 2)));
    const TensorView rows = {memory.memory().data(), floats.rows, floats.cols, floats.cols,
                             DType::kBF16};
    for (int64_t r = 0; r < rows.rows; ++r)
      kernels_.encode_bf16({floats.row<float>(r), rows.row<cpu::bf16>(r), rows.cols});
    return bench_model->repeated(rows, rows.rows);
  };
  const Materialized materialized{matrix(products.q_latent), matrix(products.q_rope),
                                  matrix(products.out)};

  const KvCache cache(config, kContext + 2 * kPageSize, DType::kBF16);
  fill_with_random(cache, config);
  const std::vector<int32_t> pages = {3, 0, 1};
  const KvCache heads =
      cache_of_heads(kernels_, config, w.kv_b, cache.layer(0), pages, kContext, team_);
  TensorView h, y;
  const Arena arena = Arena::holding([&](auto visit) {
    visit(h, 1, config.dim, DType::kF32);
    visit(y, kNumAttentionVariants, config.dim, DType::kF32);
  });
  fill_with_normal(h);
  std::vector<Buffer> memory;
  const auto there = [&](const TensorView& here) { return on_gpu(*bench_model, here, memory); };
  const TensorView h_there = there(h), y_there = there(y);
  AttentionVariants variants(config, bench_model->weights().layers[0].attn, materialized,
                             there(cache.layer(0)), pages, there(heads.layer(0)), kContext,
                             bench_model->ops(), bench_model->device());
  for (int v = 0; v < kNumAttentionVariants; ++v)
    variants.run(static_cast<AttentionVariant>(v), h_there, y_there.rows_from(v, 1));
  bench_model->device().to_host(y_there, y);
  expect_equal_rows(y, 2e-2f);

  CpuOps ops(kernels_, config, AttentionVariants::max_tokens(config.mla), team_);
  const Materialized none;
  CpuDevice device(team_);
  AttentionVariants here(config, w, none, cache.layer(0), pages, heads.layer(0), kContext, ops,
                         device);
  here.run(AttentionVariant::kACCME, h, y.rows_from(1, 1));
  expect_equal_rows(y, 2e-2f);
}

GpuBenchOptions everything(const ModelConfig& config, WeightFormats formats) {
  return {.config = config,
          .formats = formats,
          .wanted = [](const WeightSpec&) { return true; },
          .max_tokens = 4,
          .context = 64};
}

// Equal matrices, copies included, and their scales, are those of a checkpoint of random tensors.
TEST_F(GpuBench, WeightsAreRandomTensors) {
  for (const DType type : {DType::kBF16, DType::kF8E4M3}) {
    const WeightFormats formats = {{type}, {type}};
    const auto bench_model = gpus_(everything(config_, formats));
    ASSERT_TRUE(bench_model);
    RandomTensor random(formats, config_);
    ModelWeights weights = bench_model->weights();
    int n = 0;
    for_each_weight(weights, config_, [&](const WeightSpec& spec, QuantView& w) {
      const QuantView stored = random.stored(spec);
      if (is_vector(spec.use)) return;
      ASSERT_EQ(w.q.dtype, stored.q.dtype) << spec.name;
      std::vector<std::byte> wanted(stored.q.rows * stored.q.row_bytes()), got(wanted.size());
      RandomTensor::write_rows(stored, spec.use, 0, stored.q.rows, wanted.data());
      bench_model->device().to_host(w.q, {got.data(), w.q.rows, w.q.cols, w.q.cols, w.q.dtype});
      EXPECT_EQ(got, wanted) << spec.name;
      ASSERT_EQ(w.scale.empty(), stored.scale.empty());
      if (w.scale.empty()) return;
      std::vector<float> scales(w.scale.rows * w.scale.cols);
      bench_model->device().to_host(
          w.scale, {scales.data(), w.scale.rows, w.scale.cols, w.scale.cols, DType::kF32});
      for (const float scale : scales) EXPECT_EQ(scale, stored.scale.row<float>(0)[0]);
      ++n;
    });
    EXPECT_EQ(n > 0, type == DType::kF8E4M3);
  }
}

TEST_F(GpuBench, ATiedHeadIsTheEmbedding) {
  ModelConfig tied = config_;
  tied.tied_head = true;
  const auto bench_model = gpus_(everything(tied, kFormats));
  EXPECT_EQ(bench_model->weights().head.q.data, bench_model->weights().embed.q.data);
}

TEST_F(GpuBench, RowsAreRepeatedToTheLast) {
  const auto bench_model = gpus_(everything(config_, kFormats));
  std::vector<uint16_t> rows(3 * 64);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<uint16_t>(0x3f80 + i);
  for (const int64_t n : {2, 3, 8, 9}) {
    const QuantView all = bench_model->repeated({rows.data(), 3, 64, 64, DType::kBF16}, n);
    ASSERT_TRUE(all.q.rows == n && all.q.cols == 64 && all.scale.empty());
    std::vector<uint16_t> got(n * 64);
    bench_model->device().to_host(all.q, {got.data(), n, 64, 64, DType::kBF16});
    for (int64_t i = 0; i < n * 64; ++i) ASSERT_EQ(got[i], rows[i % (3 * 64)]) << n << ": " << i;
  }
}

TEST_F(GpuBench, ModelsThatDoNotFitAreLeftOut) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "the memory of a GPU is what it is";
  ModelWeights unused;
  RandomTensor random(kFormats, config_);
  int64_t bytes = 0;
  for_each_weight(unused, config_, [&](const WeightSpec& spec, QuantView&) {
    bytes += CudaWeights::bytes_of(random.stored(spec), spec.use);
  });
  for (const int64_t more : {0, 1}) {
    setenv("TANDEM_GPU_MEMORY", std::to_string(bytes + more).c_str(), 1);
    EXPECT_EQ(gpus_(everything(config_, kFormats)) != nullptr, more == 1);
  }
  unsetenv("TANDEM_GPU_MEMORY");
  EXPECT_TRUE(gpus_(everything(config_, kFormats)));
  for (const char* name : {"int8", "int4"}) {
    EXPECT_FALSE(gpus_(everything(config_, {{DType::kBF16}, weight_format(name)}))) << name;
    EXPECT_FALSE(gpus_(everything(config_, {weight_format(name), {DType::kBF16}}))) << name;
  }
}

TEST_F(GpuBench, Generate) {
  measure(
      generate_benchmark(),
      input({.tokens = {10}, .contexts = {65}, .batches = {1, 2}, .layers = 2, .new_tokens = 3}));
  const Json& report = rows_.at(0);
  EXPECT_GT(report["gpu_decode_tokens_per_second"].get<double>(), 0);
  EXPECT_GT(report["gpu_prefill_tokens_per_second"].get<double>(), 0);
  for (const Json& row : report["decode"]) EXPECT_GT(row["gpu_tokens_per_second"].get<double>(), 0);
}

class HybridBenchOnGpu : public GpuBench {
 protected:
  HybridBench bench(int n_layers, std::vector<int> batches, std::vector<int> prompts) const {
    return {.input = input({.tokens = std::move(prompts),
                            .contexts = {65},
                            .batches = std::move(batches),
                            .layers = n_layers}),
            .gpu_name = "made up"};
  }
};

TEST_F(HybridBenchOnGpu, EveryRowHasItsParts) {
  HybridBench what = bench(2, {1, 3}, {8});
  what.kernel_gap = 1e-6;
  const Json report = bench_hybrid(what, kernels_, speed_);
  EXPECT_EQ(report["resident_experts"], 8);
  ASSERT_EQ(report["decode"].size(), 2u);
  for (const Json& row : report["decode"]) {
    const int n = row["batch"].get<int>();
    for (const char* field : {"seconds", "tokens_per_second", "gpu_seconds", "cpu_seconds"})
      EXPECT_GT(row[field].get<double>(), 0) << field;
    EXPECT_GT(row["gpu_nodes"].get<int>(), 10 * 2) << "of each of 2 layers";
    EXPECT_EQ(row["gpu_early_nodes"], 0) << "not asked for";
    EXPECT_DOUBLE_EQ(row["gpu_idle_share"].get<double>(),
                     row["gpu_nodes"].get<int>() * 1e-6 / row["gpu_seconds"].get<double>());
    EXPECT_EQ(row["halves_seconds"].is_number(), n > 1);
    EXPECT_EQ(row["halves_gain"].is_number(), n > 1);
    EXPECT_TRUE(row["predicted_seconds"].is_null()) << "nothing is known of this GPU";
    EXPECT_TRUE(row["prediction_error"].is_null());
  }
  ASSERT_EQ(report["prefill"].size(), 1u);
  const Json& streamed = report["prefill"][0];
  EXPECT_EQ(streamed["tokens"], 8);
  EXPECT_GT(streamed["cpu_experts_seconds"].get<double>(), 0);
  EXPECT_NEAR(streamed["link_ratio"].get<double>(),
              streamed["bytes_brought"].get<double>() / streamed["seconds"].get<double>() /
                  streamed["copy_bytes_per_second"].get<double>(),
              1e-9);
  EXPECT_LE(streamed["crossover_tokens"].get<int>(), 8);
  EXPECT_NE(hybrid_benchmark().text(report).find("made up"), std::string::npos);
}

TEST_F(HybridBenchOnGpu, ModelsThatCannotBeMeasuredAreRefused) {
  const auto refusal = [&](const HybridBench& what) {
    return error_of([&] { bench_hybrid(what, kernels_, speed_); });
  };
  EXPECT_EQ(refusal(bench(1, {1}, {})), "--layers 1: the first layer is dense, choose at least 2");
  HybridBench too_large = bench(2, {1}, {});
  too_large.input.gpus = [](const GpuBenchOptions&) { return nullptr; };
  EXPECT_EQ(refusal(too_large),
            "2 layers without routed experts, and the caches, do not fit made up: choose fewer "
            "--layers, a shorter --ctx or a smaller --batch");
}

// The rows are those of the lists, in their order, with every field.
TEST_F(HybridBenchOnGpu, HasARowForEachCase) {
  HybridBench what = bench(2, {2, 1}, {4, 8});
  what.input.options.contexts = {65, 10};
  const Json report = bench_hybrid(what, kernels_, speed_);
  const auto keys = [](const Json& row) {
    std::string all;
    for (const auto& [key, value] : row.items()) all += key + " ";
    return all;
  };
  EXPECT_EQ(keys(report),
            "bench config card isa threads layers dense_layers experts format resident_experts "
            "gpu_kernel_gap_seconds decode prefill ");
  std::string cases;
  for (const Json& row : report["decode"]) {
    cases += fmt::format("{}x{} ", row["context"].get<int>(), row["batch"].get<int>());
    EXPECT_EQ(keys(row),
              "context batch seconds tokens_per_second gpu_seconds cpu_seconds over_larger_part "
              "halves_seconds halves_gain hand_off_seconds gpu_roofline_ratio "
              "gpu_predicted_seconds gpu_nodes gpu_early_nodes gpu_idle_share predicted_seconds "
              "prediction_error ");
    EXPECT_DOUBLE_EQ(row["tokens_per_second"].get<double>() * row["seconds"].get<double>(),
                     row["batch"].get<double>());
  }
  EXPECT_EQ(cases, "65x2 65x1 10x2 10x1 ");
  ASSERT_EQ(report["prefill"].size(), 2u);
  for (const Json& row : report["prefill"]) {
    EXPECT_EQ(keys(row),
              "tokens seconds tokens_per_second cpu_experts_seconds bytes_brought "
              "bytes_per_second copy_bytes_per_second link_ratio crossover_tokens "
              "predicted_seconds prediction_error ");
    EXPECT_DOUBLE_EQ(row["tokens_per_second"].get<double>() * row["seconds"].get<double>(),
                     row["tokens"].get<double>());
    EXPECT_NEAR(row["bytes_per_second"].get<double>() * row["seconds"].get<double>(),
                row["bytes_brought"].get<double>(), 1e-6);
    EXPECT_GE(row["bytes_brought"].get<int64_t>(), 0);
    EXPECT_LE(row["bytes_brought"].get<int64_t>(), 8 * 3 * 128 * 128 * 2) << "of one MoE layer";
  }
}

TEST_F(HybridBenchOnGpu, IsPredictedWhereTheGpuIsKnown) {
  Gpu gpu = {};
  gpu.name = "made up";
  gpu.memory_bytes = int64_t{1} << 34;
  gpu.read_bytes_per_second = 1e12;
  gpu.peak = {1e13, 1e14, 2e14, 2e14};
  gpu.h2d_bytes_per_second = gpu.d2h_bytes_per_second = gpu.h2d_pageable_bytes_per_second =
      gpu.d2h_pageable_bytes_per_second = 1e10;
  HybridBench what = bench(2, {1}, {4});
  what.rates = gpu;
  const Json report = bench_hybrid(what, kernels_, speed_);
  for (const Json& row : {report["decode"][0], report["prefill"][0]}) {
    EXPECT_GT(row["predicted_seconds"].get<double>(), 0);
    EXPECT_NEAR(row["prediction_error"].get<double>(),
                row["predicted_seconds"].get<double>() / row["seconds"].get<double>() - 1, 1e-9);
  }
}

// A CPU that takes 20 ms more for its part of a layer: the delay must appear in the CPU's own time,
// in the step and in both micro-batches, and the CPU must not be called elsewhere.
TEST_F(HybridBenchOnGpu, ASlowCpuIsInItsPartAndInTheStep) {
  constexpr std::chrono::milliseconds kSleep(20);
  constexpr double kOfLayer = 20e-3;
  constexpr int kLayers = 2, kRemembered = 4, kRounds = 1 + 3;
  int n_calls = 0;
  HybridBench what = bench(1 + kLayers, {4}, {});
  what.before_cpu = [&] {
    ++n_calls;
    std::this_thread::sleep_for(kSleep);
  };
  const Json row = bench_hybrid(what, kernels_, speed_)["decode"][0];
  EXPECT_GE(row["cpu_seconds"].get<double>(), kLayers * kOfLayer);
  EXPECT_GE(row["seconds"].get<double>(), kLayers * kOfLayer);
  EXPECT_GE(row["halves_seconds"].get<double>(), 2 * kLayers * kOfLayer);
  EXPECT_EQ(n_calls, kLayers * (kRemembered + kRounds * (1 + 2 + 1)))
      << "of the step, its halves and the CPU alone";
}

TEST(HybridRow, ComputesItsRatios) {
  ModelConfig config = tiny_config();  // two MoE layers
  HybridBench bench = {};
  bench.input.formats = kFormats;
  HybridSteps::Decode m = {
      .step = 12, .halves = 8, .no_cpu = 7, .gpu = 6, .cpu = 10, .gpu_nodes = 30};
  Json row = decode_row(m, bench, config, 100, 4);
  EXPECT_DOUBLE_EQ(row["over_larger_part"].get<double>(), 1.2);
  EXPECT_DOUBLE_EQ(row["halves_gain"].get<double>(), 1.5);
  EXPECT_DOUBLE_EQ(row["hand_off_seconds"].get<double>(), 0.5);
  EXPECT_DOUBLE_EQ(row["tokens_per_second"].get<double>(), 1. / 3);
  EXPECT_TRUE(row["gpu_roofline_ratio"].is_null()) << "nothing is known of the GPU";
  EXPECT_TRUE(row["gpu_idle_share"].is_null());
  EXPECT_TRUE(row["gpu_predicted_seconds"].is_null());

  bench.kernel_gap = 0.01;
  row = decode_row(m, bench, config, 100, 4);
  EXPECT_DOUBLE_EQ(row["gpu_idle_share"].get<double>(), 0.05);
  EXPECT_TRUE(row["gpu_predicted_seconds"].is_null()) << "no rate is known";
  bench.rates = Gpu{};
  bench.rates->read_bytes_per_second = 1e6;
  bench.rates->peak.bf16 = 1e30;
  row = decode_row(m, bench, config, 100, 4);
  EXPECT_DOUBLE_EQ(row["gpu_predicted_seconds"].get<double>(),
                   row["gpu_roofline_ratio"].get<double>() * m.gpu + 30 * 0.01);
  m.gpu_nodes = 0;
  EXPECT_TRUE(decode_row(m, bench, config, 100, 4)["gpu_idle_share"].is_null()) << "no graph";
  m.gpu_nodes = 1;
  row = decode_row(m, bench, config, 100, 2);
  EXPECT_DOUBLE_EQ(row["gpu_idle_share"].get<double>(), 0.01 / 6);
  EXPECT_EQ(row["halves_seconds"], 8);
  row = decode_row(m, bench, config, 100, 1);
  EXPECT_TRUE(row["halves_seconds"].is_null() && row["halves_gain"].is_null()) << "of one token";
}

// A GPU that reads 1 MB/s and computes in no time.
TEST(HybridRow, ComparesTheGpusPartWithItsRoofline) {
  const ModelConfig config = tiny_config();
  HybridBench bench = {};
  bench.input.formats = kFormats;
  bench.rates = Gpu{};
  bench.rates->read_bytes_per_second = 1e6;
  bench.rates->peak.bf16 = 1e30;
  const HybridSteps::Decode m = {.step = 1, .halves = 1, .no_cpu = 1, .gpu = 2, .cpu = 1};
  const auto seconds = [&](int context, int n) {
    return decode_row(m, bench, config, context, n)["gpu_roofline_ratio"].get<double>() * m.gpu;
  };
  // 3 layers, [64 latent | 16 key] in BF16.
  EXPECT_NEAR(seconds(1001, 2) - seconds(1, 2), 2 * 1000 * 3 * 160e-6, 1e-9);
  // One more sequence reads one more row of the embedding and one more cache, and no matrix.
  EXPECT_NEAR(seconds(1, 2) - seconds(1, 1), (128 * 2 + 3 * 160) * 1e-6, 1e-9);
  // BF16 weights: attention of 3 layers, one dense layer, and a router and a shared expert of two
  // layers; no head. 5,920 bytes are norms, biases, a row of the embedding and the cache.
  constexpr int kAttention = 64 * 128 + 96 * 64 + 80 * 128 + 128 * 64 + 128 * 64;
  constexpr int kFfn = 3 * 128 * 128, kRouter = 8 * 128;
  EXPECT_NEAR(seconds(1, 1), (2 * (3 * kAttention + kFfn + 2 * (kRouter + kFfn)) + 5920) * 1e-6,
              1e-9);
}

// The head of 512 sequences of R1 takes 9.5e11 operations, which are not counted.
TEST(HybridRow, LeavesOutTheOperationsOfTheHead) {
  const ModelConfig config = parse(family("r1"));
  HybridBench bench = {};
  bench.input.formats = {{DType::kBF16}, {DType::kBF16}};
  bench.rates = Gpu{};
  bench.rates->read_bytes_per_second = 1e30;
  bench.rates->peak.bf16 = 1e12;
  const HybridSteps::Decode m = {.step = 1, .halves = 1, .no_cpu = 1, .gpu = 1, .cpu = 1};
  const double seconds = decode_row(m, bench, config, 1, 512)["gpu_roofline_ratio"];
  const CostOfParts cost = cost_of_step(config, bench.input.formats, {1, 512}, 2);
  const double head = 2. * 512 * config.vocab * config.dim;
  EXPECT_NEAR(seconds, (static_cast<double>(cost.matrices.ops + cost.attention.ops) - head) * 1e-12,
              1e-6);
}

TEST(SelfTestOnGpu, ComparesTheGpuWithTheReference) {
  const ModelConfig config = small_r1();
  Team team(1);
  std::vector<SelfTestRow> rows;
  for (const WeightFormat experts : {weight_format("fp8"), weight_format("int8")})
    self_test({config, {{DType::kF8E4M3}, experts}, {}, gpu_bench_models()}, team,
              [&](const SelfTestRow& row) { rows.push_back(row); });
  ASSERT_EQ(rows.size(), 3u) << "INT8 experts have no GPU kernel";
  EXPECT_EQ(rows[1].device, "cuda");
  EXPECT_EQ(rows[1].n_rows, 2);
  EXPECT_TRUE(rows[1].passed()) << rows[1].error;
  EXPECT_GT(rows[1].error, 0);
}

// A format without a GPU kernel gives a row without GPU times.
TEST_F(GpuBench, FormatsOfTheCpuAloneHaveNoTimes) {
  BenchInput bench = input({.tokens = {1}});
  bench.formats.experts = weight_format("int8");
  bench.memory_bytes = 1 << 20;
  measure(experts_benchmark(), bench);
  ASSERT_EQ(rows_.size(), 1u);
  EXPECT_TRUE(rows_[0]["gpu_seconds"].is_null());
}

}  // namespace
}  // namespace tandem
