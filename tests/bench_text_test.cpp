// What `tandem bench` prints for given rows, compared as a whole with tests/data/bench.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "bench/gpu/gpu_benches.h"
#include "bench/line_chart.h"
#include "bench/machine/machine_report.h"
#include "tests/error_of.h"
#include "tests/expected_text.h"
#include "tests/small_config.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

Json json(const char* text) { return Json::parse(text); }

// A row of `tandem bench experts`.
Json experts_row() {
  return json(R"({"bench": "experts", "config": "r1", "format": "fp8", "isa": "avx512",
    "threads": 24, "routing": "uniform", "tokens": 4, "rows_per_expert": 1.25, "seconds": 0.0123456,
    "cpu_to_gpu_seconds": null, "gpu_seconds": null, "bytes": 25123456, "ops": 1234567890,
    "roofline_seconds": 0.0098, "roofline_ratio": 0.794, "unhidden_ratio": 0.9,
    "bytes_per_second": 2.0351e9, "ops_per_second": 1.00005e11,
    "read_bytes_per_second": 21.96e9, "peak_ops_per_second": 512.6e9,
    "instruction": "vdpbf16ps zmm", "rows_of_busiest_expert": 3, "experts": 13})");
}

// A row of `tandem bench attention` with every kind of GPU time.
Json attention_row() {
  return json(R"({"bench": "attention", "config": "v2-lite", "format": "BF16", "isa": "amx",
    "threads": 3, "what": "decode, absorbed", "tokens": 12, "context": 16384, "seconds": 0.5,
    "cpu_to_gpu_seconds": 0.25, "gpu_seconds": 0.0000625, "bytes": 1500000, "ops": 250,
    "roofline_seconds": 0.25, "roofline_ratio": 0.005, "unhidden_ratio": 0.5,
    "bytes_per_second": 3e6, "ops_per_second": 500,
    "read_bytes_per_second": 1e9, "peak_ops_per_second": 2e9,
    "instruction": "tdpbf16ps", "list": [1, 2], "object": {"a": 1}, "gpu_roofline_ratio": null})");
}

TEST(BenchText, TablesOfRows) {
  Json skewed = experts_row();
  skewed["routing"] = "skewed";
  skewed["seconds_over_uniform"] = 1.126;
  skewed["gpu_seconds"] = 2.5;
  expect_text("bench/table.txt", row_header(experts_row()) + row_text(experts_row()) +
                                     row_text(skewed) + "\n" + row_header(attention_row()) +
                                     row_text(attention_row()));
}

TEST(BenchText, CommaSeparatedValues) {
  EXPECT_EQ(csv_header(attention_row()),
            "bench,config,format,isa,threads,what,tokens,context,seconds,cpu_to_gpu_seconds,"
            "gpu_seconds,bytes,ops,roofline_seconds,roofline_ratio,unhidden_ratio,bytes_per_second,"
            "ops_per_second,read_bytes_per_second,peak_ops_per_second,instruction,"
            "gpu_roofline_ratio\n");
  EXPECT_EQ(csv_text(attention_row()),
            R"("attention","v2-lite","BF16","amx",3,"decode, absorbed",12,16384,0.5,0.25,6.25e-05,)"
            R"(1500000,250,0.25,0.005,0.5,3000000.0,500,1000000000.0,2000000000.0,"tdpbf16ps",)"
            "\n");
}

TEST(BenchText, ChartOfRows) {
  std::vector<Json> rows;
  for (const int tokens : {1, 8, 200})
    for (const char* routing : {"uniform", "skewed"}) {
      Json row = experts_row();
      row["routing"] = routing;
      row["tokens"] = tokens;
      row["seconds"] = 0.001 * tokens * (row["routing"] == "skewed" ? 2.5 : 1);
      row["roofline_seconds"] = 0.0004 * tokens;
      if (tokens > 1) row["gpu_seconds"] = 0.0001 * tokens;
      rows.push_back(row);
    }
  expect_text("bench/experts.svg", rows_chart(rows));
  std::vector<Json> attention(2, attention_row());
  attention[1]["context"] = 512;
  attention[1]["seconds"] = 0.01;
  attention[1]["cpu_to_gpu_seconds"] = nullptr;
  expect_text("bench/attention.svg", rows_chart(attention));
}

// More lines than colours, no bounds, and ranges whose ends are powers and within powers.
TEST(BenchText, ChartsOfLines) {
  LineChart chart = {"1 < 2 & 3 > 2", "x < y", "y & z", {}};
  for (int i = 0; i < 8; ++i)
    chart.lines.push_back({"line <" + std::to_string(i) + ">", {{3., 0.02 * (i + 1)}}, {}});
  chart.lines[2].points.emplace_back(50, 7);
  expect_text("bench/lines.svg", svg_of(chart));
  const LineChart exact = {"powers", "x", "y", {{"a", {{4, 1}, {4, 1000}}, {{8, 10}}}}};
  expect_text("bench/powers.svg", svg_of(exact));
  const LineChart one = {"one point", "x", "y", {{"a", {{4, 10}}, {}}}};
  expect_text("bench/point.svg", svg_of(one));
}

TEST(BenchText, Generate) {
  const Json report = json(R"({"config": "r1", "layers": 5, "dense_layers": 1,
    "resident_experts": 64, "experts": "int4", "format": "fp8", "isa": "avx2", "threads": 12,
    "read_bytes_per_second": 123.456e9, "instruction": "vfmadd231ps ymm",
    "peak_ops_per_second": 1234.5e9,
    "decode": [{"context": 1024, "batch": 8, "seconds": 0.0123456, "predicted_seconds": 0.0111,
                "prediction_error": -0.101, "tokens_per_second": 648.005,
                "bytes_per_token": 1234567890, "roofline_ratio": 0.876, "bandwidth_ratio": 0.654},
               {"context": 8192, "batch": 1, "seconds": 2, "predicted_seconds": 3,
                "prediction_error": 0.5, "tokens_per_second": 0.5, "bytes_per_token": 1000000,
                "roofline_ratio": 0.05, "bandwidth_ratio": 0.04}],
    "drafts": [{"context": 1024, "batch": 8, "seconds": 0.0183456, "predicted_seconds": 0.0191,
                "prediction_error": 0.0411, "tokens_per_second": 793.65,
                "bytes_per_token": 1034567890, "roofline_ratio": 0.856, "bandwidth_ratio": 0.634,
                "draft_tokens": 1, "acceptance": 0.85, "measured_acceptance": 0.823,
                "tokens_per_step": 1.823, "times_without": 1.2247,
                "predicted_times_without": 1.2349}],
    "prefill": [{"tokens": 512, "seconds": 1.5, "predicted_seconds": 1.25,
                 "prediction_error": -0.16667, "tokens_per_second": 341.333}]})");
  expect_text("bench/generate.txt", generate_benchmark().text(report));
}

TEST(BenchText, Hybrid) {
  Json report = json(R"({"bench": "hybrid", "config": "k2", "card": "a GPU", "layers": 4,
    "dense_layers": 1, "resident_experts": 48, "experts": "fp8", "threads": 16, "isa": "amx",
    "format": "bf16",
    "decode": [{"context": 4096, "batch": 1, "seconds": 0.0123456, "gpu_seconds": 0.004,
                "cpu_seconds": 0.0075, "over_larger_part": 1.646, "halves_seconds": null,
                "halves_gain": null, "hand_off_seconds": 0.00001234, "predicted_seconds": null,
                "prediction_error": null, "gpu_roofline_ratio": null, "gpu_predicted_seconds": null, "gpu_idle_share": null},
               {"context": 128, "batch": 32, "seconds": 0.1, "gpu_seconds": 0.05,
                "cpu_seconds": 0.075, "over_larger_part": 1.333, "halves_seconds": 0.08,
                "halves_gain": 1.25, "hand_off_seconds": -0.000002, "predicted_seconds": 0.0905,
                "prediction_error": -0.095, "gpu_roofline_ratio": 0.625, "gpu_predicted_seconds": 0.0123, "gpu_idle_share": 0.021}],
    "prefill": []})");
  const Benchmark hybrid = hybrid_benchmark();
  std::string text = hybrid.text(report);
  report["prefill"].push_back(json(R"({"tokens": 512, "seconds": 0.25, "cpu_experts_seconds": 0.75,
    "bytes_per_second": 25.678e9, "copy_bytes_per_second": 50.123e9, "link_ratio": 0.512,
    "crossover_tokens": 200, "predicted_seconds": 0.3, "prediction_error": 0.2})"));
  text += "\n" + hybrid.text(report);
  HandOffs m = {.kernels = {1.5e-5, 2.345e-5, ""}, .memory_operations = {{}, 1e-5, "no capture"}};
  const Json row = hand_off_row(m, "a GPU");
  EXPECT_EQ(row.dump(),
            R"({"bench":"hand-off","card":"a GPU","kernels":{"recorded_seconds":1.5e-05,)"
            R"("enqueued_seconds":2.345e-05,"why_not":""},"memory_operations":)"
            R"({"recorded_seconds":null,"enqueued_seconds":1e-05,"why_not":"no capture"}})");
  expect_text("bench/hybrid.txt", text + "\n" + hybrid.text(row));
}

TEST(BenchText, Machine) {
  const Json measured = json(R"({"cpu": "a processor", "cores": 8, "threads": 4, "numa_nodes": 2,
    "isa": "avx512",
    "read_loops": [{"loop": "vmovdqu zmm", "one_thread": 12.34e9, "all": 98.76e9},
                   {"loop": "prefetcht0 + movaps", "one_thread": 2e9, "all": 120e9}],
    "instructions": [{"type": "fp32", "instruction": "vfmadd231ps zmm", "one_core": 150.25e9,
                      "all_cores": 1200e9},
                     {"type": "int8", "instruction": "vpdpbusd zmm", "one_core": 600e9,
                      "all_cores": 4801.5e9}],
    "gpus": [], "notes": ["a note"]})");
  std::string text = machine_text(measured);
  Json report = measured;
  add_disk_and_gpus(report, {3.456e9, "a file of 256 MB"}, {.gpus = {}, .why_none = "no driver"});
  EXPECT_EQ(report["disk_read_bytes_per_second"], 3.456e9);
  EXPECT_EQ(report["notes"], json(R"(["a note", "no GPU: no driver"])"));
  text += "\n" + machine_text(report);

  report = measured;
  Gpu gpu = {};
  gpu.name = "first";
  gpu.memory_bytes = 80'000'000'000;
  gpu.read_bytes_per_second = 2039.4e9;
  gpu.peak = {.fp32 = 19.54e12, .bf16 = 312.46e12};
  gpu.h2d_bytes_per_second = 25.11e9;
  gpu.d2h_bytes_per_second = 26.22e9;
  gpu.h2d_pageable_bytes_per_second = 7.33e9;
  gpu.d2h_pageable_bytes_per_second = 8.44e9;
  const std::vector<GpuInfo> gpus = {{"first", 80'000'000'000}, {"second", 24'500'000'000}};
  add_disk_and_gpus(report, {0, "why not"}, {.gpus = gpus, .rates = gpu});
  EXPECT_TRUE(report["disk_read_bytes_per_second"].is_null());
  EXPECT_EQ(report["disk"], "why not");
  EXPECT_EQ(report["gpus"][1], json(R"({"name": "second", "memory_bytes": 24500000000,
    "read_bytes_per_second": null, "h2d_bytes_per_second": null, "d2h_bytes_per_second": null})"));
  EXPECT_EQ(report["notes"].size(), 1u);
  text += "\n" + machine_text(report);

  report = measured;
  add_disk_and_gpus(report, {0, "no room"}, {.gpus = gpus, .why_no_rates = "it is busy"});
  EXPECT_TRUE(report["gpus"][0]["read_bytes_per_second"].is_null());
  expect_text("bench/machine.txt", text + "\n" + machine_text(report));
}

// A GPU that reads 1 TB/s and multiplies 2 Top/s.
BenchInput input_of_a_gpu(const ModelConfig& config, std::vector<int> tokens) {
  Gpu gpu = {};
  gpu.name = "a GPU";
  gpu.read_bytes_per_second = 1e12;
  gpu.peak = {.fp32 = 1, .bf16 = 2e12};
  return {.options = {.config = "made up", .tokens = std::move(tokens), .seconds = 0.125},
          .config = config,
          .formats = {{DType::kF8E4M3}, {DType::kBF16}},
          .gpu = gpu};
}

std::string texts_of(const Benchmark& benchmark, const std::vector<Json>& rows) {
  std::string text = benchmark.header(rows.at(0));
  for (const Json& row : rows) text += benchmark.text(row);
  return text;
}

TEST(BenchText, Kernels) {
  const BenchInput bench = input_of_a_gpu(small_r1(), {1, 700});
  std::vector<Json> rows;
  const auto keep = [&](const Json& row) { rows.push_back(row); };
  // Each takes as long as its bytes and 3 us, less or more than the target, or has no room.
  const auto timer = [&](SmallKernel kernel, int n, double seconds) -> std::optional<double> {
    EXPECT_EQ(seconds, 0.125);
    const double moving = static_cast<double>(bytes_of(kernel, small_r1(), n)) / 1e12;
    if (kernel == SmallKernel::kAppend) return {};
    if (kernel == SmallKernel::kAppendFp8) return 1.3 * moving + 3e-6;
    if (kernel == SmallKernel::kAdd) return 1.301 * moving + 3e-6;
    return moving + (n == 1 ? 2e-6 : 4e-6);
  };
  bench_kernels(bench, timer, keep);
  std::string text = texts_of(kernels_benchmark(), rows);
  for (const Json& row : rows) {
    std::string keys;
    for (const auto& [key, value] : row.items()) keys += key + " ";
    EXPECT_EQ(keys,
              "bench config card what tokens bytes gpu_seconds read_bytes_per_second bound_seconds "
              "ratio target_seconds within_target ");
    EXPECT_EQ(row["card"], "a GPU");
    const double moving = row["bytes"].get<double>() / 1e12;
    EXPECT_DOUBLE_EQ(row["target_seconds"].get<double>(), 1.3 * moving + 3e-6);
  }
  rows.clear();
  ModelConfig dense = small_r1();
  dense.router.n_experts = 0;
  bench_kernels(input_of_a_gpu(dense, {9}), {}, keep);
  for (const Json& row : rows) EXPECT_EQ(row["card"], "");
  expect_text("bench/kernels.txt", text + "\n" + texts_of(kernels_benchmark(), rows));
}

// The bytes for two tokens, counted by hand. The model has dimension 256, 4 heads, a latent of 128,
// a RoPE key of 16, 4 of 32 experts active and a dense layer of 384.
TEST(BenchText, BytesOfSmallKernels) {
  ModelConfig c = small_r1();
  const std::pair<SmallKernel, int64_t> wanted[] = {
      {SmallKernel::kEmbed, 2 * (4 + 256 * 2 + 256 * 4)},
      {SmallKernel::kNorm, 2 * 4 * 256 * 4 + 256 * 4},
      {SmallKernel::kAppend, 2 * (8 + 2 * 4 * 16 * 4 + 144 * 4 + 144 * 2) + (128 + 8) * 4},
      {SmallKernel::kAppendFp8, 2 * (8 + 2 * 4 * 16 * 4 + 144 * 4 + 656) + (128 + 8) * 4},
      {SmallKernel::kRoute, 2 * 256 * 4 + 32 * 256 * 4 + 32 * 4 + 2 * 4 * (4 + 4)},
      {SmallKernel::kSortPairs, 2 * 4 * 3 * 4 + 33 * 4},
      {SmallKernel::kGather, 2 * (4 + 2 * 256 * 4)},
      {SmallKernel::kRound, 2 * (256 * 4 + 256 * 2)},
      {SmallKernel::kCombine, 2 * 4 * (256 * 4 + 4 + 4) + 2 * 2 * 256 * 4},
      {SmallKernel::kSiluMul, 2 * 3 * 384 * 4},
      {SmallKernel::kAdd, 2 * 3 * 256 * 4}};
  for (const auto& [kernel, bytes] : wanted)
    EXPECT_EQ(bytes_of(kernel, c, 2), bytes) << name_of(kernel);
  c.router.method = TopkMethod::kGreedy;
  EXPECT_EQ(bytes_of(SmallKernel::kRoute, c, 2), 34 * 256 * 4 + 2 * 4 * (4 + 4)) << "no bias";
}

TEST(BenchText, Products) {
  BenchInput bench = input_of_a_gpu(small_r1(), {32, 2000});
  std::vector<Json> rows;
  const auto keep = [&](const Json& row) { rows.push_back(row); };
  std::string asked;
  const auto timer = [&](const ManyRowsProduct& p, int n, double seconds) -> ProductTimes {
    EXPECT_EQ(seconds, 0.125);
    const int kind = static_cast<int>(p.kind);
    asked += fmt::format("{}: {} [{}, {}] x {}, {} rows\n", p.what, kind, p.rows, p.cols,
                         p.n_experts, n);
    if (kind == 1) return {0.00123456, {}, 0.00061728};
    if (kind == 2) return {{}, n > 32 ? std::optional(0.5) : std::nullopt, {}, "not in 120400"};
    return {0.004, 0.0025};
  };
  bench_products(bench, timer, "130100", keep);
  for (const Json& row : rows) {
    std::string keys;
    for (const auto& [key, value] : row.items()) keys += key + " ";
    EXPECT_EQ(keys, std::string("bench config card format what n_experts tokens ops gpu_seconds "
                                "ops_per_second peak_ops_per_second cublas cublas_seconds "
                                "cublas_ratio ") +
                        (row["n_experts"] > 1
                             ? "cublas_grouped_seconds cublas_grouped_ratio cublas_grouped_why_not "
                             : ""));
    EXPECT_EQ(row["peak_ops_per_second"], 2e12);
    EXPECT_EQ(row["cublas_ratio"].is_number(),
              row["gpu_seconds"].is_number() && row["cublas_seconds"].is_number());
  }
  expect_text("bench/products.txt", asked + "\n" + texts_of(products_benchmark(), rows));
  bench.config.router.n_experts = 0;
  bench.config.mla.q_rank = 0;
  EXPECT_EQ(products_of(bench.config).size(), 2u) << "gate and the output of attention";
  bench.config.router.n_experts = 5;
  EXPECT_EQ(products_of(bench.config).back().n_experts, 5);
}

TEST(BenchText, ProductsOfFewRowsAreRefused) {
  const auto refusal = [](const BenchInput& bench) {
    return error_of([&] { products_benchmark().check_input(bench); });
  };
  BenchInput bench = input_of_a_gpu(small_r1(), {17, 18});
  bench.gpus = [](const GpuBenchOptions&) { return nullptr; };
  EXPECT_EQ(refusal(bench), "no error");
  bench.options.tokens = {17, 16};
  EXPECT_EQ(refusal(bench), "--tokens 16: at least 17 on a GPU; `bench mlp` has fewer");
  bench.gpus = {};
  EXPECT_EQ(refusal(bench), "no error") << "of a CPU";
}

}  // namespace
}  // namespace tandem
