// `tandem bench embed|moe|layer|generate`: the counts of bytes and operations, and the output
// formats of rows.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "bench/benchmark.h"
#include "bench/line_chart.h"
#include "tests/error_of.h"
#include "tests/small_config.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

BenchInput small_bench() {
  return {.options = {.tokens = {1, 40}, .contexts = {16, 100}, .layers = 2, .seconds = 0.002},
          .config = small_r1(),
          .formats = {{DType::kF8E4M3}, {DType::kI8}},
          .memory_bytes = 32 << 20};
}

TEST(LayerCosts, OfR1) {
  const ModelConfig r1 = bench_config("r1");
  const WeightFormats fp8 = {{DType::kF8E4M3}, {DType::kF8E4M3}};
  const CostOfParts moe = cost_of_layer(r1, fp8, true, 16384, 1, 2);
  // Attention 187,105,280 and a shared expert of 44,040,192 with 14,136 scales, a BF16 router.
  EXPECT_EQ(moe.matrices.bytes, 187'105'280 + 44'040'192 + 4 * 14'136 + 2 * 1'835'008);
  EXPECT_EQ(moe.matrices.ops, 2 * 232'980'480);
  EXPECT_EQ(moe.experts.bytes, 352'407'552) << "eight";
  EXPECT_EQ(moe.experts.ops, 704'643'072);
  EXPECT_EQ(moe.attention.bytes, 18'874'368);
  EXPECT_EQ(moe.attention.ops, 4'563'402'752);

  const CostOfParts dense = cost_of_layer(r1, fp8, false, 16384, 1, 2);
  EXPECT_EQ(dense.matrices.ops, 2 * (187'105'280 + int64_t{3} * 7168 * 18432));
  EXPECT_EQ(dense.experts.bytes, 0);

  // Two tokens miss (1 - 1/32)^2 of the experts: 15.75 are expected.
  const CostOfParts two = cost_of_layer(r1, fp8, true, 16384, 2, 2);
  EXPECT_EQ(two.experts.bytes, int64_t{352'407'552} / 8 * 63 / 4);
  EXPECT_EQ(two.matrices.bytes, moe.matrices.bytes);
  EXPECT_EQ(two.attention.ops, 2 * moe.attention.ops);
  // Of 512 tokens keys and values are restored: fewer operations than in latent space.
  const CostOfParts many = cost_of_layer(r1, fp8, true, 16384, 512, 2);
  EXPECT_LT(many.attention.ops, 512 * moe.attention.ops * 6 / 10);
}

class LayerRows : public testing::Test {
 protected:
  const cpu::KernelTable kernels_ = cpu::kernels_for(cpu::best_isa());
  Team team_{0};
  MachineSpeed speed_{team_, 8 << 20};
  std::vector<Json> rows_;
  const OnRow keep_ = [this](const Json& row) { rows_.push_back(row); };
};

TEST_F(LayerRows, Embed) {
  const Benchmark embed = embed_benchmark();
  BenchInput bench = small_bench();
  bench.options.tokens = {1, 7};
  embed.on_cpu(bench, kernels_, speed_, keep_);
  ASSERT_EQ(rows_.size(), 2u);
  EXPECT_EQ(rows_[1]["bytes"], 7 * 256 * (2 + 4));
  EXPECT_GT(rows_[1]["seconds"], 0);
  EXPECT_TRUE(rows_[0]["gpu_seconds"].is_null()) << "there is no GPU code yet";
  bench.memory_bytes = 1000;
  EXPECT_TRUE(says(error_of([&] { embed.on_cpu(bench, kernels_, speed_, keep_); }), "--memory"));
}

TEST_F(LayerRows, MoeCountsSharedExpertsAndRouter) {
  moe_benchmark().on_cpu(small_bench(), kernels_, speed_, keep_);
  ASSERT_EQ(rows_.size(), 2u);
  const int64_t routed = 3 * 256 * 128 + 4 * (128 + 128 + 256);
  const int64_t shared = 3 * 256 * 128 + 4 * 3 * 2;
  EXPECT_EQ(rows_[0]["bytes"], 4 * routed + shared + 2 * 32 * 256);
  EXPECT_EQ(rows_[0]["ops"], 2 * (4 * 3 * 256 * 128 + 3 * 256 * 128 + 32 * 256));
  EXPECT_EQ(rows_[1]["resident_layers"], 2);
  EXPECT_GT(rows_[1]["seconds"], 0);
}

TEST_F(LayerRows, DenseThenMoeOfEveryContext) {
  layer_benchmark().on_cpu(small_bench(), kernels_, speed_, keep_);
  ASSERT_EQ(rows_.size(), 6u) << "40 tokens do not fit a context of 16";
  EXPECT_EQ(rows_[0]["what"], "dense layer");
  EXPECT_EQ(rows_[5]["what"], "MoE layer");
  EXPECT_EQ(rows_[5]["context"], 100);
  EXPECT_EQ(rows_[5]["tokens"], 40);
  for (const Json& row : rows_) EXPECT_GT(row["roofline_ratio"], 0);
}

TEST_F(LayerRows, Generate) {
  BenchInput bench = small_bench();
  bench.options.layers = 3;
  bench.options.contexts = {10, 100};
  bench.options.batches = {1, 3};
  bench.options.tokens = {5, 70};
  bench.options.new_tokens = 3;
  bench.step_tokens = 64;
  bench.memory_bytes = 64 << 20;
  generate_benchmark().on_cpu(bench, kernels_, speed_, keep_);
  const Json& r = rows_.at(0);
  EXPECT_EQ(r["layers"], 3);
  EXPECT_EQ(r["dense_layers"], 1);
  EXPECT_EQ(r["resident_experts"], 32);
  ASSERT_EQ(r["decode"].size(), 4u);
  EXPECT_EQ(r["decode"][3]["batch"], 3);
  ASSERT_EQ(r["prefill"].size(), 2u);
  EXPECT_EQ(r["bytes_per_token"], r["decode"][0]["bytes_per_token"]);
  EXPECT_EQ(r["decode"][2]["bytes_per_token"].get<int64_t>() -
                r["decode"][0]["bytes_per_token"].get<int64_t>(),
            3 * 90 * 144 * 2)
      << "the cache of 90 tokens more";
  for (const char* key : {"prefill_tokens_per_second", "decode_tokens_per_second", "roofline_ratio",
                          "bandwidth_ratio"})
    EXPECT_GT(r[key], 0) << key;
  for (const char* phase : {"decode", "prefill"})
    for (const Json& row : r[phase]) {
      const double predicted = row["predicted_seconds"], seconds = row["seconds"];
      EXPECT_TRUE(std::isfinite(predicted) && predicted > 0) << row;
      EXPECT_DOUBLE_EQ(row["prediction_error"], predicted / seconds - 1);
    }
  EXPECT_FALSE(generate_benchmark().text(r).empty());
}

TEST(RowText, MarkdownCsvAndChart) {
  Json row = {{"bench", "experts"},    {"config", "r1"},       {"format", "fp8"},
              {"isa", "avx2"},         {"threads", 2},         {"routing", "uniform"},
              {"tokens", 4},           {"rows_per_expert", 1}, {"seconds", 0.0125},
              {"gpu_seconds", nullptr}};
  row["roofline_seconds"] = 0.01;
  row["roofline_ratio"] = 0.8;
  row["bytes"] = 25000000;
  row["ops"] = 125;
  row["bytes_per_second"] = row["ops_per_second"] = 2e9;
  row["read_bytes_per_second"] = row["peak_ops_per_second"] = 1e10;
  row["instruction"] = "vfmadd231ps ymm";
  const std::string head = row_header(row), line = row_text(row);
  EXPECT_TRUE(says(head, "| tokens |"));
  EXPECT_TRUE(says(line, "| uniform  |      4 |"));
  EXPECT_TRUE(says(line, "12.5 |  no GPU |")) << line;
  EXPECT_TRUE(says(line, "       25 |  0.000125 |")) << line;
  EXPECT_TRUE(says(line, " 80 % |"));
  EXPECT_EQ(csv_header(row).rfind("bench,config,format,", 0), 0u);
  EXPECT_TRUE(says(csv_text(row), "\"uniform\",4,1,0.0125,,0.01")) << "null is an empty field";

  Json skewed = row;
  skewed["routing"] = "skewed";
  skewed["seconds_over_uniform"] = 1.1;
  const auto bars = [](const std::string& text) {
    return std::count(text.begin(), text.end(), '|');
  };
  EXPECT_EQ(bars(row_text(skewed)), bars(line)) << "one table";

  Json later = row;
  later["tokens"] = 64;
  later["gpu_seconds"] = 0.001;
  const Json rows[] = {row, later, skewed};
  const std::string svg = rows_chart(rows);
  EXPECT_EQ(svg.rfind("<svg", 0), 0u);
  EXPECT_TRUE(says(svg, ">fp8 uniform<"));
  EXPECT_TRUE(says(svg, ">fp8 skewed<"));
  EXPECT_TRUE(says(svg, ">fp8 uniform, GPU<"));
  EXPECT_FALSE(says(svg, ">fp8 skewed, GPU<"));
  EXPECT_EQ(svg.find("nan"), std::string::npos);
}

TEST(LineChart, PlacesPowersOnTheAxes) {
  const std::string svg =
      svg_of({"a < b", "x", "y", {{"line", {{1, 0.1}, {4, 10}}, {{1, 0.1}, {4, 10}}}}});
  EXPECT_TRUE(says(svg, "a &lt; b"));
  // The plot spans x = 70..600 and y = 424..46.
  EXPECT_TRUE(says(svg, R"(points="70.0,424.0 600.0,46.0 ")"));
  EXPECT_TRUE(says(svg, ">0.1</text>"));
  EXPECT_TRUE(says(svg, ">4</text>"));
}

}  // namespace
}  // namespace tandem
