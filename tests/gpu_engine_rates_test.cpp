// `tandem bench machine` with a GPU, real or emulated: rates that the planner can use.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>

#include "bench/gpu/gpu_benches.h"
#include "bench/machine/machine_report.h"
#include "gpu_kernels/peaks.h"
#include "gpu_kernels/runtime.h"
#include "io/machine_json.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

// A thread that reads the magic number reports it, so the test detects words that no thread reads.
TEST(GpuProbes, EveryWordIsRead) {
  constexpr int64_t kWords = 4 * (3 * 256 * 5 + 7);  // no multiple of what the threads take
  constexpr uint32_t kMagic = 0x2c0ffee5;
  gpu::Stream stream;
  const gpu::Buffer data(kWords * 4, gpu::Site::kDevice), host(kWords * 4, gpu::Site::kMapped);
  const gpu::Buffer out(4, gpu::Site::kDevice), found(4, gpu::Site::kMapped);
  const auto words = host.as<uint32_t>();
  const auto written = [&](int64_t magic_at) {
    std::memset(words, 0, host.bytes());
    if (magic_at >= 0) words[magic_at] = kMagic;
    *found.as<uint32_t>() = 0;
    stream.copy(words, host.bytes(), data.as<uint32_t>());
    stream.copy(found.as<uint32_t>(), 4, out.as<uint32_t>());
    gpu::read_once(stream, data.as<uint32_t>(), data.bytes(), 3, out.as<uint32_t>());
    stream.copy(out.as<uint32_t>(), 4, found.as<uint32_t>());
    stream.wait();
    return *found.as<uint32_t>();
  };
  EXPECT_EQ(written(-1), 0u);
  for (const int64_t at :
       {int64_t{0}, int64_t{3 * 256 * 4}, kWords / 2 + 1, kWords - 29, kWords - 1})
    EXPECT_EQ(written(at), kMagic) << at;
}

TEST(GpuProbes, CountWhatTheyMultiply) {
  gpu::Stream stream;
  const gpu::Buffer out(4, gpu::Site::kDevice);
  // 2 blocks of 8 warps, 3 rounds of 8 products [16, 16] x [16, 8].
  EXPECT_EQ(gpu::multiply_bf16(stream, 2, 3, out.as<float>()), 2 * 8 * 3 * 8 * 4096);
  if (gpu::open_gpu().fp8_mma) {  // [16, 32] x [32, 8]
    EXPECT_EQ(gpu::multiply_fp8(stream, 2, 3, out.as<float>()), 2 * 8 * 3 * 8 * 8192);
  }
  // 2 blocks of 256 threads, 3 rounds of 128 multiplications and additions.
  EXPECT_EQ(gpu::multiply_f32(stream, 2, 3, out.as<float>()), 2 * 256 * 3 * 128 * 2);
  stream.wait();
  if (!gpu::open_gpu().emulated) return;
  setenv("TANDEM_GPU_BLOCKS", "1", 1);  // the first and the last block of each grid
  constexpr int kBlocks = 1 << 24;
  EXPECT_EQ(gpu::multiply_bf16(stream, kBlocks, 1, out.as<float>()),
            int64_t{kBlocks} * 8 * 8 * 4096);
  EXPECT_EQ(gpu::multiply_f32(stream, kBlocks, 1, out.as<float>()),
            int64_t{kBlocks} * 256 * 128 * 2);
  stream.wait();
  unsetenv("TANDEM_GPU_BLOCKS");
}

TEST(GpuProbes, IdleKernelsTakeTheirTime) {
  gpu::Stream stream;
  gpu::idle_cycles(stream, 1000);
  stream.wait();
  const auto start = std::chrono::steady_clock::now();
  gpu::idle_cycles(stream, 20'000'000);  // 5 ms at 4 GHz
  stream.wait();
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(5));
}

TEST(GpuRates, BoundsHaveThePeakOfFp8WhereItIsAskedFor) {
  EXPECT_EQ(measured_gpu_bounds(1e-3).peak.fp8, 0);
  if (!gpu::open_gpu().fp8_mma) GTEST_SKIP() << "no FP8 mma";
  EXPECT_GT(measured_gpu_bounds(1e-3, true).peak.fp8, 1e3);
}

// Rows of which two have a time on the GPU; keeps the rates that the run measured.
std::optional<Gpu> rates_of_run;
void four_rows(const BenchInput& bench, const cpu::KernelTable&, MachineSpeed&,
               const OnRow& on_row) {
  rates_of_run = bench.gpu;
  on_row({{"bytes", 1000}, {"ops", 1}, {"gpu_seconds", 0.5}});
  on_row({{"bytes", 1}, {"ops", 1'000'000'000}, {"gpu_seconds", 0.25}});
  on_row({{"bytes", 1}, {"ops", 1}, {"gpu_seconds", nullptr}});
  on_row({{"ops", 1}});
}

TEST(GpuRates, RowsAreComparedWithTheGpusRoofline) {
  Benchmark benchmark = {.name = "made up", .help = "", .examples = "", .flags = {}};
  benchmark.on_cpu = four_rows;
  const auto rows_of = [&](bool fp8) {
    BenchInput input = {.options = {.isa = cpu::Isa::kReference,
                                    .fp8_activations = fp8,
                                    .memory_gb = 1e-3,
                                    .n_threads = 1}};
    input.gpus = gpu_bench_models(fp8);
    std::vector<Json> rows;
    run_benchmark(benchmark, input, [&](const Json& row) { rows.push_back(row); });
    return rows;
  };
  const bool has_fp8 = gpu::open_gpu().fp8_mma;
  for (const bool fp8 : {false, true}) {
    if (fp8 && !has_fp8) continue;
    const std::vector<Json> rows = rows_of(fp8);
    ASSERT_TRUE(rates_of_run);
    const PeakRates& peak = rates_of_run->peak;
    EXPECT_EQ(rates_of_run->h2d_bytes_per_second, 0) << "not needed for bounds";
    EXPECT_EQ(peak.fp8 > 0, fp8);
    const auto bound = [&](double bytes, double ops) {
      return std::max(bytes / rates_of_run->read_bytes_per_second,
                      ops / (fp8 ? peak.fp8 : peak.bf16));
    };
    EXPECT_DOUBLE_EQ(rows[0]["gpu_roofline_ratio"].get<double>(), bound(1000, 1) / 0.5);
    EXPECT_DOUBLE_EQ(rows[1]["gpu_roofline_ratio"].get<double>(), bound(1, 1e9) / 0.25);
    EXPECT_TRUE(rows[2]["gpu_roofline_ratio"].is_null());
    EXPECT_FALSE(rows[3].contains("gpu_roofline_ratio"));
    for (const Json& row : rows) EXPECT_EQ(row.value("gpu_activations", ""), fp8 ? "fp8" : "");
  }
  if (gpu::open_gpu().emulated) {  // an A100 of 4 multiprocessors at 1 GHz
    setenv("TANDEM_GPU_CAPABILITY", "80", 1);
    const std::vector<Json> rows = rows_of(false);
    unsetenv("TANDEM_GPU_CAPABILITY");
    EXPECT_DOUBLE_EQ(rows[1]["gpu_datasheet_ratio"].get<double>(), 1e9 / 0.25 / (4 * 2048e9));
    EXPECT_TRUE(rows[2]["gpu_datasheet_ratio"].is_null());
    EXPECT_FALSE(rows[3].contains("gpu_datasheet_ratio"));
    EXPECT_FALSE(rows_of(false)[1].contains("gpu_datasheet_ratio")) << "no data sheet";
  }
  benchmark.all_gpu_rates = true;
  rows_of(false);
  EXPECT_GT(rates_of_run->h2d_bytes_per_second, 0);
  EXPECT_GT(rates_of_run->peak.fp32, 0);
}

TEST(GpuRates, AreWhatThePlannerReads) {
  const Gpu gpu = measured_gpu(1e-3);
  for (const double rate : {gpu.read_bytes_per_second, gpu.peak.fp32, gpu.peak.bf16,
                            gpu.h2d_bytes_per_second, gpu.d2h_bytes_per_second,
                            gpu.h2d_pageable_bytes_per_second, gpu.d2h_pageable_bytes_per_second}) {
    EXPECT_GT(rate, 1e3);
    EXPECT_LT(rate, 1e17);
  }
  EXPECT_EQ(gpu.peak.fp8, 0)
      << "the planner would believe that FP8 is multiplied unless asked not to";

  const FoundGpus found = {.gpus = {{gpu.name, gpu.memory_bytes}, {"another", 1 << 30}},
                           .rates = gpu};
  Json report =
      Json::parse(R"({"cpu": "a", "isa": "avx512", "sockets": 1, "numa_nodes": 1, "cores": 2,
    "memory_bytes": 1000000000000, "read_bytes_per_second": {"one_thread": 1e10, "all": 2e10},
    "peak_ops_per_second": {"fp32": 1e11, "bf16": null, "int8": null}, "gpus": [], "notes": [],
    "measured_at": 1})");
  add_disk_and_gpus(report, {1e9, "a disk"}, found);
  const bool known = gpu.datasheet_bf16_ops_per_second > 0;
  EXPECT_EQ(report["gpus"][0].contains("datasheet_bf16_ops_per_second"), known);
  Json known_report = report;
  known_report["gpus"][0]["datasheet_bf16_ops_per_second"] = 989e12;
  for (const char* key : {"read_loops", "instructions"}) known_report[key] = Json::array();
  known_report["threads"] = 2;
  EXPECT_NE(machine_text(known_report).find("BF16 (mma; data sheet: 989.0)"), std::string::npos);
  const Machine m = machine_from_json(report.dump(), "report");
  ASSERT_EQ(m.gpus.size(), 1u);
  EXPECT_EQ(m.n_unmeasured_gpus, 1);
  EXPECT_EQ(m.gpus[0].h2d_bytes_per_second, gpu.h2d_bytes_per_second);
  EXPECT_EQ(m.gpus[0].peak.bf16, gpu.peak.bf16);
  EXPECT_EQ(m.gpus[0].memory_bytes, gpu.memory_bytes);
}

}  // namespace
}  // namespace tandem
