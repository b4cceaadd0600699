// What the benchmarks of parts ask of a GPU and of the CPU's kernels, call by call, and every
// number of their rows, with a clock of which each reading is known. The expected lines are
// tests/data/bench/calls_*.txt.
#include <gtest/gtest.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "bench/gpu/gpu_benches.h"
#include "bench/parts/attention_variants.h"
#include "bench/parts/products.h"
#include "tests/error_of.h"
#include "tests/expected_text.h"
#include "tests/fake_clock.h"
#include "tests/fake_provider.h"
#include "tests/recorded_bench_model.h"
#include "tests/small_config.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

// Numbers with six digits, which do not depend on the order of a compiler's operations.
void round_numbers(Json& part) {
  for (auto& [key, value] : part.items()) {
    if (value.is_structured()) round_numbers(value);
    if (value.is_number_float()) value = std::stod(fmt::format("{:.6g}", value.get<double>()));
  }
}

class BenchCalls : public testing::Test {
 protected:
  BenchCalls() { FakeClock::restart(); }

  BenchInput input(BenchOptions options) {
    options.config = "small";
    options.seconds = 5e-3;
    ModelConfig config = small_r1();
    config.n_layers = 3;
    return {.options = std::move(options),
            .config = config,
            .formats = {{DType::kF8E4M3}, {DType::kBF16}},
            .memory_bytes = 32 << 20,
            .step_tokens = 16,
            .gpus = [this](const GpuBenchOptions& o) {
              return std::make_unique<RecordedBenchModel>(o, log_);
            }};
  }

  void run(const Benchmark& benchmark, const BenchInput& bench) {
    benchmark.on_cpu(bench, kernels_, speed_, [&](const Json& row) { keep(row); });
  }
  void keep(const Json& row) {
    Json shown = row;
    round_numbers(shown);
    log_.begin_section("row " + shown.dump());
    rows_.push_back(row);
  }

  std::string calls() const {
    std::string text;
    for (const std::string& line : log_.lines) text += line + "\n";
    return text;
  }
  // The rows, and from each section the first n different lines with one of these beginnings.
  std::string calls(std::initializer_list<const char*> begins, int n) const {
    std::string text;
    std::set<std::string> seen;
    for (const std::string& line : log_.lines) {
      const bool is_row = line.starts_with("row ") || line.ends_with(" waits");
      const bool is_wanted = std::any_of(
          begins.begin(), begins.end(), [&](const char* begin) { return line.starts_with(begin); });
      if (is_row) seen.clear();
      if (is_row || (is_wanted && std::ssize(seen) < n && seen.insert(line).second))
        text += line + "\n";
    }
    return text;
  }

  CallLog log_;
  const RecordedKernels recorded_{log_};
  const cpu::KernelTable kernels_ = RecordedKernels::table();
  const FakeClock clock_{std::chrono::microseconds(400)};
  Team team_{1};
  MachineSpeed speed_{team_, 1 << 20};
  std::vector<Json> rows_;
};

TEST_F(BenchCalls, Embed) {
  log_.runs_of_section = 1 << 20;
  run(embed_benchmark(), input({.tokens = {2, 3}}));
  expect_text("bench/calls_embed.txt",
              calls({"model", "allocate", "to_gpu", "begin", "embed", "cpu"}, 14));
}

TEST_F(BenchCalls, Mlp) {
  BenchInput bench = input({.tokens = {1, 3}});
  // Two layers: gate, up and down [384, 256], the output of attention [256, 128], with scales.
  bench.memory_bytes = 2 * (3 * (384 * 256 + 3 * 2 * 4) + 256 * 128 + 2 * 4);
  run(mlp_benchmark(), bench);
  expect_text("bench/calls_mlp.txt", calls());
  bench.memory_bytes = bench.memory_bytes / 2 - 1;
  EXPECT_TRUE(says(error_of([&] { run(mlp_benchmark(), bench); }), "a layer does not fit"));
}

// Beside a provider that takes floats, but not of 64 columns, and where there is none.
TEST_F(BenchCalls, ProductsOfACpu) {
  if (cpu::best_isa() < cpu::Isa::kAvx2) GTEST_SKIP() << "no panels on this CPU";
  const cpu::KernelTable kernels = cpu::kernels_for(cpu::Isa::kAvx2);
  BenchInput bench = input({.tokens = {1, 3}});
  bench.config.mla.q_rank = 0;
  // Two layers with copies: gate [384, 256], down, the output of attention [256, 128], queries
  // [192, 256].
  const int64_t layer = (2 * 384 * 256 + 256 * 128 + 192 * 256) * 4;
  bench.memory_bytes = 2 * 2 * layer;
  bench.formats.backbone = {DType::kF32};
  FakeProvider provider;
  provider.takes = [](DType, int64_t cols) { return cols != 128; };
  const auto measure = [&](const OneDnnHere& onednn) {
    const size_t first = rows_.size();
    bench_dense_products(bench, kernels, speed_, onednn, [&](const Json& row) { keep(row); });
    std::string table = products_benchmark().header(rows_[first]);
    for (size_t i = first; i < rows_.size(); ++i) table += products_benchmark().text(rows_[i]);
    return table;
  };
  std::string tables = measure({&provider, "a provider"}) + "\n";
  EXPECT_GT(provider.n_calls, 0);
  bench.formats.backbone = {DType::kF8E4M3};
  tables += measure({nullptr, "oneDNN is not installed"});
  expect_text("bench/calls_products.txt", calls() + "\n" + tables);

  bench.formats.backbone = {DType::kF32};
  bench.memory_bytes = 2 * layer - 1;
  EXPECT_TRUE(says(error_of([&] { measure({&provider, ""}); }), "a layer does not fit"));
}

TEST_F(BenchCalls, Head) {
  BenchInput bench = input({.tokens = {1, 3}});
  // The head [vocab, 256] and three routers [32, 256] in BF16.
  const int64_t head = int64_t{bench.config.vocab} * 256 * 2, router = 32 * 256 * 2;
  bench.memory_bytes = head + 4 * router - 1;
  run(head_benchmark(), bench);
  expect_text("bench/calls_head.txt", calls());
  bench.memory_bytes = head + router - 1;
  EXPECT_TRUE(says(error_of([&] { run(head_benchmark(), bench); }), "the head and a router need"));
}

TEST_F(BenchCalls, Experts) {
  BenchInput bench = input({.tokens = {6}, .skew = true});
  bench.memory_bytes = 2 * 32 * 3 * 256 * 128 * 2;  // two layers
  log_.kernels_of_section = 250;
  run(experts_benchmark(), bench);
  expect_text("bench/calls_experts.txt", calls());
  EXPECT_DOUBLE_EQ(rows_[1]["seconds_over_uniform"].get<double>(),
                   rows_[1]["seconds"].get<double>() / rows_[0]["seconds"].get<double>());
}

TEST_F(BenchCalls, Moe) {
  run(moe_benchmark(), input({.tokens = {2, 6}, .layers = 2}));
  expect_text("bench/calls_moe.txt", calls());
}

TEST_F(BenchCalls, MoeWithoutSharedExperts) {
  BenchInput bench = input({.tokens = {2}, .layers = 2});
  bench.config.n_shared_experts = 0;
  run(moe_benchmark(), bench);
  expect_text("bench/calls_moe_alone.txt", calls());
}

TEST_F(BenchCalls, Attention) {
  BenchInput bench =
      input({.tokens = {2, 70}, .contexts = {65, 3}, .batches = {1, 2}, .draft_tokens = {2}});
  // Two caches of two sequences of two pages.
  bench.memory_bytes = 2 * 2 * 2 * kPageSize * 144 * 4;
  run(attention_benchmark(), bench);
  expect_text("bench/calls_attention.txt", calls());
}

// A cache made for more tokens than are measured: pages and the GPU's limits are those of the
// limit, keys and costs those of the context.
TEST_F(BenchCalls, AttentionInACacheForMore) {
  BenchInput bench = input({.tokens = {2}, .contexts = {3}, .batches = {1, 2}});
  run(attention_benchmark(), bench);
  const std::vector<Json> close = std::exchange(rows_, {});
  log_.begin_section("limit 130");
  bench.options.context_limit = 130;
  run(attention_benchmark(), bench);
  ASSERT_EQ(rows_.size(), close.size());
  for (size_t i = 0; i < rows_.size(); ++i) {
    EXPECT_EQ(close[i]["context_limit"], 3);
    EXPECT_EQ(rows_[i]["context_limit"], 130);
    for (const char* key : {"what", "tokens", "context", "bytes", "ops"})
      EXPECT_EQ(rows_[i][key], close[i][key]) << key;
    EXPECT_TRUE(rows_[i]["gpu_seconds"].is_number());
  }
  expect_text("bench/calls_attention_limit.txt", calls({"model", "begin", "cpu"}, 6));

  const Benchmark attention = attention_benchmark();
  attention.check_input(bench);
  bench.options.contexts = {3, 131};
  EXPECT_TRUE(says(error_of([&] { attention.check_input(bench); }),
                   "--context-limit 130: a context of 131 tokens is to be measured"));
  bench.options.contexts = {3};
  bench.memory_bytes = 2 * 3 * kPageSize * 144 * 4 - 1;  // two sequences of three pages
  EXPECT_TRUE(says(error_of([&] { run(attention_benchmark(), bench); }),
                   "--context-limit 130 --batch 2: the cache of one layer needs"));
  bench.memory_bytes += 1;
  bench.gpus = [](const GpuBenchOptions& o) {
    EXPECT_EQ(o.cache_bytes, 2 * 3 * kPageSize * 144 * 2);
    return std::unique_ptr<GpuBenchModel>();
  };
  EXPECT_TRUE(says(error_of([&] { run(attention_benchmark(), bench); }),
                   "--context-limit 130 --batch 2: the caches of 1 layers do not fit the GPU"));
  bench.options.context_limit = 0;
  run(attention_benchmark(), bench);
  EXPECT_TRUE(rows_.back()["gpu_seconds"].is_null()) << "as without a GPU";
}

TEST_F(BenchCalls, AttentionVariants) {
  run(attention_benchmark(), input({.contexts = {130, 3}, .variants = true}));
  expect_text("bench/calls_variants.txt", calls());
}

TEST_F(BenchCalls, Layer) {
  run(layer_benchmark(), input({.tokens = {1, 5}, .contexts = {65, 4}, .layers = 2}));
  expect_text("bench/calls_layer.txt", calls({"model", "begin", "to_gpu", "cpu"}, 16));
}

TEST_F(BenchCalls, ModelsWithoutDenseLayersHaveRowsOfMoeLayersAlone) {
  BenchInput bench = input({.tokens = {1}, .contexts = {4}, .layers = 1});
  bench.config.n_dense_layers = 0;
  run(layer_benchmark(), bench);
  ASSERT_EQ(rows_.size(), 1u);
  EXPECT_EQ(rows_[0]["what"], "MoE layer");
}

// Sequences decode two tokens after their first; a prompt of 20 tokens runs in steps of 16.
TEST_F(BenchCalls, Generate) {
  log_.runs_of_section = 1 << 20;
  run(generate_benchmark(),
      input({.tokens = {20}, .contexts = {65}, .batches = {1, 2}, .layers = 2, .new_tokens = 3}));
  // The positions of the different steps: tokens are random, and pages are reused.
  std::set<std::string> seen;
  std::string text;
  int n_decoding = 0;
  for (const std::string& line : log_.lines) {
    if (!line.starts_with("begin")) continue;
    const std::string at = line.substr(line.find(" at "), line.find(" {") - line.find(" at "));
    if (seen.insert(at).second) text += "step" + at + "\n";
    // The scores of all tokens are equal, of which greedy decoding takes the first.
    if (at.starts_with(" at (65") || at.starts_with(" at (66")) {
      EXPECT_TRUE(line.starts_with("begin (0) at") || line.starts_with("begin (0 0) at")) << line;
      ++n_decoding;
    }
  }
  EXPECT_GT(n_decoding, 0);
  expect_text("bench/calls_generate.txt", text + calls({"model"}, 1));
}

// Drafts that are always right give 1 + k tokens a step, and drafts that are always wrong one.
TEST_F(BenchCalls, GenerateWithDrafts) {
  log_.runs_of_section = 1 << 20;
  BenchInput bench = input({.tokens = {1},
                            .contexts = {70},
                            .batches = {2},
                            .layers = 2,
                            .new_tokens = 9,
                            .draft_tokens = {0, 1, 2},
                            .acceptances = {1, 0.5, 0},
                            .decided_steps = 40});
  bench.gpus = {};
  run(generate_benchmark(), bench);
  const Json& plain = rows_.back()["decode"][0];
  std::vector<std::pair<int, double>> cases;
  for (const Json& row : rows_.back()["drafts"]) {
    SCOPED_TRACE(row.dump());
    EXPECT_EQ(row["batch"], plain["batch"]);
    EXPECT_EQ(row["context"], plain["context"]);
    const double tokens = row["tokens_per_step"], measured = row["measured_acceptance"];
    const double acceptance = row["acceptance"];
    const int k = row["draft_tokens"];
    cases.emplace_back(k, acceptance);
    if (acceptance == 0.5) {
      EXPECT_NEAR(measured, 0.5, 0.15);
      EXPECT_NEAR(tokens, k == 1 ? 1.5 : 1.75, 0.25);
    } else {
      EXPECT_EQ(measured, acceptance);
      EXPECT_EQ(tokens, 1 + k * acceptance);
    }
    EXPECT_DOUBLE_EQ(row["expected_tokens_per_step"],
                     1 + acceptance + (k == 2 ? acceptance * acceptance : 0));
    const double batch = row["batch"], seconds = row["seconds"];
    EXPECT_DOUBLE_EQ(row["tokens_per_second"], batch * tokens / seconds);
    EXPECT_DOUBLE_EQ(row["times_without"], row["tokens_per_second"].get<double>() /
                                               plain["tokens_per_second"].get<double>());
    EXPECT_DOUBLE_EQ(row["predicted_times_without"], row["expected_tokens_per_step"].get<double>() *
                                                         plain["predicted_seconds"].get<double>() /
                                                         row["predicted_seconds"].get<double>());
    // More experts, but one cache and one set of matrices for all tokens of a sequence.
    EXPECT_GT(row["bytes_per_token"].get<double>() * tokens, plain["bytes_per_token"]);
    EXPECT_LT(row["bytes_per_token"].get<double>() * tokens,
              (1 + k) * plain["bytes_per_token"].get<double>());
  }
  const std::vector<std::pair<int, double>> all = {{1, 1}, {1, 0.5}, {1, 0},
                                                   {2, 1}, {2, 0.5}, {2, 0}};
  EXPECT_EQ(cases, all);
  ASSERT_EQ(rows_.back()["decided_drafts"].size(), 3u);
  for (const Json& row : rows_.back()["decided_drafts"]) {
    SCOPED_TRACE(row.dump());
    EXPECT_GE(row["steps"], 40);
    EXPECT_GT(row["times_without"], 0);
    EXPECT_GT(row["times_without_at_equal_rates"], 0);
    const double tokens = row["tokens_per_step"];
    if (row["acceptance"] == 0) {
      EXPECT_EQ(tokens, 1);
      EXPECT_GT(row["rejected"], 0) << "probes";
    } else {
      EXPECT_GT(tokens, 1);
    }
    EXPECT_EQ(row["acceptance"] == 1, row["rejected"] == 0);
  }
}

// Decode steps of one and two sequences, then prompts in steps that stream experts to the GPU.
TEST_F(BenchCalls, Hybrid) {
  log_.runs_of_section = 1 << 20;
  log_.kernels_of_section = 0;
  HybridBench what = {
      .input = input({.tokens = {6}, .contexts = {65}, .batches = {1, 2}, .layers = 2}),
      .gpu_name = "made up",
      .rates = Gpu{},
      .kernel_gap = 1e-6};
  what.rates->read_bytes_per_second = 1e12;
  what.rates->peak = {1e13, 1e14, 2e14, 2e14};
  what.rates->h2d_bytes_per_second = what.rates->d2h_bytes_per_second = 1e10;
  what.rates->h2d_pageable_bytes_per_second = what.rates->d2h_pageable_bytes_per_second = 5e9;
  what.before_cpu = [&] { log_.lines.push_back("cpu"); };
  keep(bench_hybrid(what, kernels_, speed_));
  std::string text;
  for (const std::string& line : log_.lines)
    for (const char* begin : {"model", "share", "crossover", "allocate", "begin", "micro", "stream",
                              "submit", "copy", "wait", "cpu", "row"})
      if (line.starts_with(begin)) text += line + "\n";
  expect_text("bench/calls_hybrid.txt", text);

  RecordedHybrid::crossover = {};
  const Json report = bench_hybrid(what, kernels_, speed_);
  RecordedHybrid::crossover = 77;
  EXPECT_EQ(report["decode"].size(), 2u);
  EXPECT_TRUE(report["prefill"].empty()) << "experts cannot be streamed";
}

// Layers of the cache on a GPU hold the same random numbers as one in host memory.
TEST_F(BenchCalls, TheCacheOnTheGpuIsFilled) {
  ModelConfig config = small_r1();
  config.n_layers = 2;
  const ModelOnGpu model(input({}).gpus,
                         {.config = config,
                          .formats = {{DType::kBF16}, {DType::kBF16}},
                          .wanted = [](const WeightSpec&) { return true; }},
                         {1, 1}, 2 * kPageSize);
  const KvCache host(config, 2 * kPageSize, DType::kBF16);
  ModelConfig one = config;
  one.n_layers = 1;
  fill_with_random(host, one);
  const TensorView wanted = host.layer(0);
  ASSERT_EQ(wanted.rows, 2 * kPageSize);
  for (int l = 0; l < 2; ++l)
    for (int64_t r = 0; r < wanted.rows; ++r)
      ASSERT_EQ(std::memcmp(model.cache()->layer(l).row_data(r), wanted.row_data(r),
                            wanted.cols * size_of(wanted.dtype)),
                0)
          << l << ", " << r;
  const ModelOnGpu none({}, {.config = config, .formats = {}, .wanted = {}}, {1, 1}, kPageSize);
  EXPECT_FALSE(none.model() || none.cache() || none.bench_model());
}

}  // namespace
}  // namespace tandem
