// How a benchmark is run: its options and defaults, the curves that it predicts with, the
// measurement of runs beside the machine's rates, and the predictions.
#include "bench/benchmark.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <numeric>

#include "bench/machine/this_machine.h"
#include "bench/prediction.h"
#include "core/machine_info.h"
#include "io/machine_json.h"
#include "loader/loaded_model.h"
#include "model/cost.h"
#include "tests/error_of.h"
#include "tests/fake_clock.h"
#include "tests/small_config.h"
#include "tests/temp_directory.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

void measures_nothing(const BenchInput&, const cpu::KernelTable&, MachineSpeed&, const OnRow&) {}

Benchmark made_up() {
  return {.name = "made up",
          .help = "",
          .examples = "",
          .flags = {{BenchFlag::kConfig}},
          .tokens = {3, 4},
          .contexts = {5},
          .batches = {6, 7},
          .memory_part = 0.25,
          .on_cpu = measures_nothing};
}

TEST(BenchInputs, HaveTheBenchmarksDefaults) {
  const BenchInput usual = checked_input(made_up(), {});
  EXPECT_EQ(usual.options.tokens, (std::vector<int>{3, 4}));
  EXPECT_EQ(usual.options.contexts, (std::vector<int>{5}));
  EXPECT_EQ(usual.options.batches, (std::vector<int>{6, 7}));
  EXPECT_EQ(usual.options.isa, default_isa());
  EXPECT_EQ(usual.config.n_layers, 61) << "r1";
  EXPECT_EQ(format_name(usual.formats.backbone), "fp8");
  EXPECT_EQ(format_name(usual.formats.experts), "fp8");
  EXPECT_EQ(usual.step_tokens, kStepTokens);
  const auto part = static_cast<double>(usual.memory_bytes) / 0.25,
             available = static_cast<double>(available_memory_bytes());
  EXPECT_GT(part, available / 2);
  EXPECT_LT(part, available * 2);

  const BenchInput given = checked_input(made_up(), {.config = "k2",
                                                     .experts = weight_format("int4-32"),
                                                     .format = weight_format("bf16"),
                                                     .isa = cpu::Isa::kReference,
                                                     .tokens = {1},
                                                     .contexts = {2, 9},
                                                     .batches = {8},
                                                     .memory_gb = 0.5});
  EXPECT_EQ(given.options.tokens, (std::vector<int>{1}));
  EXPECT_EQ(given.options.contexts, (std::vector<int>{2, 9}));
  EXPECT_EQ(given.options.batches, (std::vector<int>{8}));
  EXPECT_EQ(given.options.isa, cpu::Isa::kReference);
  EXPECT_EQ(given.config.router.n_experts, 384);
  EXPECT_EQ(format_name(given.formats.backbone), "bf16");
  EXPECT_EQ(format_name(given.formats.experts), "int4-32");
  EXPECT_EQ(given.memory_bytes, 500'000'000);

  // Where there is no GPU, a benchmark of either device measures the CPU.
  Benchmark either = made_up();
  either.cpu_tokens = {7};
  EXPECT_EQ(checked_input(either, {}).options.tokens, (std::vector<int>{7}));
  EXPECT_EQ(error_of([&] { checked_input(either, {.device = DeviceChoice::kCuda}); }),
            "--device cuda: there is no GPU to measure");

  Benchmark alone = made_up();
  alone.flags.clear();
  EXPECT_EQ(checked_input(alone, {.seconds = 7}).options.seconds, 7);
  EXPECT_EQ(checked_input(alone, {}).step_tokens, 0) << "there is no model";
}

TEST(BenchInputs, AreChecked) {
  const auto refusal = [](const BenchOptions& o) {
    return error_of([&] { checked_input(made_up(), o); });
  };
  EXPECT_EQ(refusal({.tokens = {1, 65536}}), "no error");
  EXPECT_EQ(refusal({.tokens = {65537}}), "--tokens 65537: must be between 1 and 65536");
  EXPECT_EQ(refusal({.tokens = {5, 0}}), "--tokens 0: must be between 1 and 65536");
  EXPECT_EQ(refusal({.contexts = {1, 16777216}}), "no error");
  EXPECT_EQ(refusal({.contexts = {16777217}}), "--ctx 16777217: must be between 1 and 16777216");
  EXPECT_EQ(refusal({.batches = {1, 512}}), "no error");
  EXPECT_EQ(refusal({.batches = {513}}), "--batch 513: must be between 1 and 512");
  EXPECT_EQ(refusal({.draft_tokens = {0, 8}}), "no error");
  EXPECT_EQ(refusal({.draft_tokens = {1, 9}}), "--draft-tokens 9: must be between 0 and 8");
  EXPECT_EQ(refusal({.draft_tokens = {-1}}), "--draft-tokens -1: must be between 0 and 8");
  EXPECT_EQ(refusal({.seconds = 3600}), "no error");
  EXPECT_EQ(refusal({.seconds = 3601}), "--seconds 3601: must be above 0 and at most 3600");
  EXPECT_EQ(refusal({.seconds = 0}), "--seconds 0: must be above 0 and at most 3600");
  EXPECT_TRUE(says(refusal({.memory_gb = -0.5}), "--memory -0.5: must be between 0 and the "));
  const double free_gb = static_cast<double>(available_memory_bytes()) * 1e-9;
  EXPECT_EQ(refusal({.memory_gb = free_gb / 2}), "no error");
  EXPECT_TRUE(says(refusal({.memory_gb = free_gb * 2}), " GB that are free"));
  for (const char* name : {"int8", "int4", "int4-32"})
    EXPECT_EQ(
        refusal({.format = weight_format(name)}),
        std::string("--format ") + name + ": integers are for routed experts alone, see --experts");
  EXPECT_EQ(refusal({.experts = weight_format("int4")}), "no error");
  EXPECT_TRUE(says(refusal({.config = "r9"}), "--config r9 does not exist, and it is none of "));
  EXPECT_TRUE(says(refusal({.config = "no/r1"}), "--config no/r1 does not exist"));

  Benchmark checks = made_up();
  checks.check = [](const BenchOptions& o) { require(o.layers != 4, "four"); };
  checks.check_input = [](const BenchInput& b) { require(b.options.tokens.size() != 1, "one"); };
  EXPECT_EQ(error_of([&] { checked_input(checks, {}); }), "no error");
  EXPECT_EQ(error_of([&] { checked_input(checks, {.layers = 4}); }), "four");
  EXPECT_EQ(error_of([&] { checked_input(checks, {.tokens = {9}}); }), "one");
}

TEST(BenchInputs, NewTokensHaveBounds) {
  const auto refusal = [](int n) {
    return error_of([&] { generate_benchmark().check({.new_tokens = n}); });
  };
  EXPECT_EQ(refusal(2), "no error");
  EXPECT_EQ(refusal(65536), "no error");
  EXPECT_EQ(refusal(1), "-n 1: must be between 2 and 65536");
  EXPECT_EQ(refusal(65537), "-n 65537: must be between 2 and 65536");
}

TEST(BenchInputs, DraftsHaveBounds) {
  const auto refusal = [](BenchOptions o) {
    return error_of([&] { generate_benchmark().check(o); });
  };
  EXPECT_EQ(refusal({.draft_tokens = {1}, .acceptances = {0}}), "no error");
  EXPECT_EQ(refusal({.draft_tokens = {0}, .acceptances = {0.5, 1}}), "no error");
  EXPECT_EQ(refusal({.acceptances = {1, 1.1}}), "--acceptance 1.1: must be between 0 and 1");
  EXPECT_EQ(refusal({.acceptances = {-0.1}}), "--acceptance -0.1: must be between 0 and 1");
  EXPECT_EQ(refusal({.draft_tokens = {1}, .decided_steps = 1}), "no error");
  EXPECT_EQ(refusal({.draft_tokens = {1}, .decided_steps = -1}),
            "--decided-steps -1: must be between 0 and 65536");
  EXPECT_EQ(refusal({.decided_steps = 5}),
            "--decided-steps 5: add --draft-tokens, the most that are drafted");
  BenchInput bench = {.options = {.batches = {103}, .draft_tokens = {4, 1}}, .step_tokens = 512};
  EXPECT_EQ(error_of([&] { generate_benchmark().check_input(bench); }),
            "--batch 103 with --draft-tokens 4: a step has at most 512 tokens");
}

Json machine_with_curves(const std::string& cpu, const std::string& isa) {
  Json report = Json::parse(R"({"sockets": 1, "numa_nodes": 1, "cores": 2,
    "memory_bytes": 1000000000000, "read_bytes_per_second": {"one_thread": 1e10, "all": 2e10},
    "peak_ops_per_second": {"fp32": 1e11, "bf16": 1e11, "int8": 1e11}, "gpus": [], "notes": []})");
  report["cpu"] = cpu;
  report["isa"] = isa;
  report["efficiency"] = curves_to_json({{"dense", "fp8", {{1, 0.5}, {8, 0.75}}}});
  return report;
}

// What the last run of `keeps_input` got.
struct Seen {
  std::vector<EfficiencyCurve> curves;
  int n_threads;
  std::string isa;
} seen;
void keeps_input(const BenchInput& bench, const cpu::KernelTable& kernels, MachineSpeed& speed,
                 const OnRow& on_row) {
  seen = {bench.curves, speed.team().size(), kernels.name};
  on_row({{"seconds", 1}});
}

// Only curves of this processor, measured with the same instruction set, are used.
TEST(RunBenchmark, TakesTheSavedCurvesOfThisMachine) {
  const CacheDirectory cache;
  Benchmark benchmark = made_up();
  benchmark.on_cpu = keeps_input;
  const auto curves_after = [&](const std::string& cpu, const std::string& isa) {
    if (!cpu.empty()) {
      Json saved = machine_with_curves(cpu, isa);
      EXPECT_TRUE(save_this_machine(saved));
    }
    std::vector<Json> rows;
    run_benchmark(
        benchmark,
        checked_input(benchmark, {.isa = cpu::Isa::kReference, .memory_gb = 0.001, .n_threads = 1}),
        [&](const Json& row) { rows.push_back(row); });
    EXPECT_EQ(rows, (std::vector<Json>{{{"seconds", 1}}})) << "no field of a GPU";
    EXPECT_EQ(seen.n_threads, 1);
    EXPECT_EQ(seen.isa, "reference");
    return seen.curves.size();
  };
  const std::string here = machine_info().cpu;
  EXPECT_EQ(curves_after("", ""), 0u) << "nothing is saved";
  EXPECT_EQ(curves_after(here, "reference"), 1u);
  EXPECT_EQ(seen.curves[0].work, "dense");
  EXPECT_EQ(seen.curves[0].points, (std::vector<std::pair<double, double>>{{1, 0.5}, {8, 0.75}}));
  EXPECT_EQ(curves_after(here, "avx2"), 0u) << "of other kernels";
  EXPECT_EQ(curves_after("another processor", "reference"), 0u);
}

TEST(RunBenchmark, RowsBeginWithWhatWasMeasured) {
  Team team(1);
  MachineSpeed speed(team, 1 << 20);
  const BenchInput bench = {.options = {.config = "r1"}};
  EXPECT_EQ(new_row("what", bench, "fp8", cpu::kernels_for(cpu::Isa::kReference), speed).dump(),
            R"({"bench":"what","config":"r1","format":"fp8","isa":"reference","threads":1})");
}

TEST(ThisMachine, KeepsCurvesUntilTheyAreMeasuredAgain) {
  const CacheDirectory cache;
  char host[256] = {};
  ASSERT_EQ(gethostname(host, sizeof host), 0);
  EXPECT_EQ(this_machine_path(),
            fmt::format("{}/tandem/machine-{}.json", cache.dir().path(), host));
  EXPECT_FALSE(saved_this_machine());
  const auto saved = [](Json report, bool with_curves) {
    if (!with_curves) report.erase("efficiency");
    EXPECT_TRUE(save_this_machine(report));
    EXPECT_EQ(report.contains("efficiency"), !saved_this_machine()->curves.empty());
    return saved_this_machine().value();
  };
  EXPECT_TRUE(saved(machine_with_curves("a", "avx2"), false).curves.empty());
  const auto before = std::time(nullptr);
  const Machine first = saved(machine_with_curves("a", "avx2"), true);
  EXPECT_EQ(first.curves.size(), 1u);
  EXPECT_GE(first.measured_at, before);
  EXPECT_LE(first.measured_at, std::time(nullptr));
  EXPECT_EQ(saved(machine_with_curves("a", "avx2"), false).curves.size(), 1u) << "kept";
  Json own = machine_with_curves("a", "avx2");
  own["efficiency"] = curves_to_json({{"dense", "bf16", {{2, 0.25}}}});
  EXPECT_EQ(saved(own, true).curves[0].format, "bf16") << "not replaced by the previous ones";
  EXPECT_TRUE(saved(machine_with_curves("a", "avx512"), false).curves.empty());
  saved(machine_with_curves("a", "avx2"), true);
  EXPECT_TRUE(saved(machine_with_curves("b", "avx2"), false).curves.empty());

  std::ofstream(this_machine_path()) << "{";
  EXPECT_FALSE(saved_this_machine()) << "unreadable";
  setenv("XDG_CACHE_HOME", "/proc/no-such", 1);
  Json report = machine_with_curves("a", "avx2");
  EXPECT_FALSE(save_this_machine(report));
}

TEST(ThisMachine, AgeInWords) {
  const std::pair<int64_t, const char*> wanted[] = {
      {0, "just now"},          {59, "just now"},       {60, "1 minute ago"},
      {119, "1 minute ago"},    {120, "2 minutes ago"}, {3599, "59 minutes ago"},
      {3600, "1 hour ago"},     {7200, "2 hours ago"},  {86399, "23 hours ago"},
      {86400, "1 day ago"},     {172799, "1 day ago"},  {172800, "2 days ago"},
      {8640000, "100 days ago"}};
  for (const auto& [seconds, words] : wanted) EXPECT_EQ(age_in_words(seconds), words) << seconds;
}

TEST(Roofline, BoundsAndRatios) {
  const Bounds bounds{.read_bytes_per_second = 100, .ops_per_second = 1000};
  EXPECT_EQ(bounds.unhidden_seconds({.bytes = 200, .ops = 3000}), 5);
  const Measured m = {.seconds = 2,
                      .cost = {600, 8000},
                      .bounds = bounds,
                      .roofline_ratio = 0.25,
                      .unhidden_ratio = 0.75};
  EXPECT_EQ(m.roofline_seconds(), 0.5);
  Json row;
  cpu::PeakLoop peak = {};
  peak.instruction = "an instruction";
  add_fields(row, m, peak, {.with_copy = 3, .on_gpu = 4});
  EXPECT_EQ(row.dump(),
            R"({"seconds":2.0,"cpu_to_gpu_seconds":3.0,"gpu_seconds":4.0,"bytes":600,"ops":8000,)"
            R"("roofline_seconds":0.5,"roofline_ratio":0.25,"unhidden_ratio":0.75,)"
            R"("bytes_per_second":300.0,"ops_per_second":4000.0,"read_bytes_per_second":100.0,)"
            R"("peak_ops_per_second":1000.0,"instruction":"an instruction"})");
}

TEST(Roofline, CountedInstructionsBoundTheTime) {
  const Bounds bounds{
      .read_bytes_per_second = 100, .ops_per_second = 1000, .instructions_per_second = 10};
  EXPECT_EQ(bounds.bound_seconds({.bytes = 200, .ops = 1000, .instructions = 50}), 5);
  EXPECT_EQ(bounds.bound_seconds({.bytes = 200, .ops = 7000, .instructions = 50}), 7);
  EXPECT_EQ(bounds.bound_seconds({.bytes = 900, .ops = 7000, .instructions = 50}), 9);
  EXPECT_EQ(bounds.bound_seconds({.bytes = 200, .ops = 1000}), 2) << "not counted";
  Json row;
  cpu::PeakLoop peak = {};
  peak.instruction = "an instruction";
  add_fields(row,
             {.seconds = 8,
              .cost = {.bytes = 200, .ops = 1000, .instructions = 50},
              .bounds = bounds,
              .bound_ratio = 0.625},
             peak);
  EXPECT_EQ(row["instructions"], 50);
  EXPECT_EQ(row["instructions_per_second"], 10);
  EXPECT_EQ(row["bound_seconds"], 5);
  EXPECT_EQ(row["bound_ratio"], 0.625);
}

// Two thirds of a burst's time is then for reading and operations; the ratio is that of the bursts
// beside each run.
TEST(Roofline, InstructionsAreMeasuredBesideWorkThatCountsThem) {
  if (!cpu::cpu_has(cpu::Feature::kAvx2)) GTEST_SKIP() << "no AVX2";
  const FakeClock clock(std::chrono::microseconds(500), false);
  Team team(1);
  MachineSpeed speed(team, 1 << 20);
  const Work work = {{.bytes = 1000, .ops = 0, .instructions = 4'000'000'000},
                     [](int64_t) { FakeClock::advance(std::chrono::microseconds(1500)); }};
  const cpu::PeakLoop& peak = speed.best_peak_loop(cpu::Arithmetic::kF32, cpu::Isa::kAvx2);
  const Measured m = measure(speed, peak, {&work, 1}, 0.006)[0];
  // A burst runs 16 times 100,000 rounds in 0.5 ms.
  const double rate = 16e5 * static_cast<double>(cpu::speed_loops(1).start->instructions_per_round);
  EXPECT_DOUBLE_EQ(m.bounds.instructions_per_second, rate / 5e-4);
  EXPECT_DOUBLE_EQ(m.bound_ratio, 4e9 / (rate / 5e-4) / 2e-3);
}

// Every run takes 2 ms, and every burst 0.5 ms.
TEST(Roofline, RunsTakeTurnsForTheTimeThatTheyAreGiven) {
  constexpr double kRunSeconds = 0.012;
  const FakeClock clock(std::chrono::microseconds(500), false);
  Team team(1);
  MachineSpeed speed(team, 1 << 20);
  std::string turns;
  const auto sleeper = [&](char name) {
    return [&turns, name](int64_t) {
      turns += name;
      FakeClock::advance(std::chrono::microseconds(1500));
    };
  };
  const Work works[] = {{{1000, 0}, sleeper('a')},
                        {{0, 1000}, sleeper('b')},
                        {{2000, 0}, sleeper('c'), {{1000, 0}, {1000, 0}}}};
  std::vector<std::pair<double, double>> progress;
  const auto measured = measure(speed, speed.peak_loops()[0], works, kRunSeconds,
                                [&](double done, double of) { progress.emplace_back(done, of); });
  EXPECT_EQ(turns,
            "abc"
            "aabbcc"
            "aabbcc"
            "aabbcc")
      << "one that does not count, then three rounds";
  ASSERT_EQ(measured.size(), 3u);
  // A burst reads 64 MiB, or runs 16 times the 400 rounds of which 2,000 took 0.5 ms.
  constexpr double kReads = 64 * (1 << 20) / 5e-4;
  const double ops = 16 * 400 * static_cast<double>(speed.peak_loops()[0].ops_per_round) / 5e-4;
  const double rooflines[] = {1000 / kReads, 1000 / ops, 2000 / kReads};
  for (int w = 0; w < 3; ++w) {
    const Measured& m = measured[w];
    EXPECT_EQ(m.cost.bytes, works[w].cost.bytes);
    EXPECT_EQ(m.cost.ops, works[w].cost.ops);
    EXPECT_DOUBLE_EQ(m.seconds, 2e-3);
    EXPECT_DOUBLE_EQ(m.bounds.read_bytes_per_second, kReads);
    EXPECT_NEAR(m.roofline_ratio, rooflines[w] / 2e-3, m.roofline_ratio * 1e-9);
    EXPECT_DOUBLE_EQ(m.roofline_ratio, m.unhidden_ratio) << "only bytes, or only operations";
  }
  ASSERT_EQ(progress.size(), 3 * 3 + 1u);
  for (int i = 0; i < 9; ++i) {
    EXPECT_NEAR(progress[i].first, 4e-3 * (i + 1), 1e-6);
    EXPECT_NEAR(progress[i].second, 3 * kRunSeconds, 1e-6) << "the whole time is expected";
  }
  EXPECT_NEAR(progress[9].first, 3 * kRunSeconds, 1e-6);
  EXPECT_EQ(progress[9].first, progress[9].second);
}

// Runs that take longer than the time that they are given are expected to take three times that.
TEST(Roofline, LongRunsAreExpectedToTakeLonger) {
  const FakeClock clock(std::chrono::milliseconds(5), false);
  Team team(1);
  MachineSpeed speed(team, 1 << 20);
  int n_runs = 0;
  const Work work = {{1000, 0}, [&](int64_t) {
                       ++n_runs;
                       FakeClock::advance(std::chrono::milliseconds(n_runs == 1 ? 0 : 15));
                     }};
  std::vector<double> expected;
  measure(speed, speed.peak_loops()[0], {&work, 1}, 0.001,
          [&](double done, double of) { expected.push_back(std::round((of - done) * 1e3)); });
  EXPECT_EQ(n_runs, 1 + 3);
  EXPECT_EQ(expected, (std::vector<double>{0, 0, 0, 0})) << "20 ms are more than 15 ms";
  const Work even = {{1000, 0}, [](int64_t) {}};
  expected.clear();
  measure(speed, speed.peak_loops()[0], {&even, 1}, 0.001,
          [&](double done, double of) { expected.push_back(std::round((of - done) * 1e3)); });
  EXPECT_EQ(expected, (std::vector<double>{10, 5, 0, 0}));
}

// Groups of runs last a millisecond: ten of 0.1 ms, timed as one.
TEST(Roofline, ShortRunsAreTimedTogether) {
  const FakeClock clock(std::chrono::nanoseconds(0), false);
  std::string calls;
  const auto run = [&](int microseconds) {
    return [&calls, microseconds](int64_t) {
      calls += 'r';
      FakeClock::advance(std::chrono::microseconds(microseconds));
    };
  };
  const auto wait = [&] { calls += 'w'; };
  const std::string ten(10, 'r');
  EXPECT_NEAR(seconds_of_runs(run(99), wait, 0), 99e-6, 1e-12);
  EXPECT_EQ(calls, "rwrw" + ten + "w" + ten + "w" + ten + "w");
  calls.clear();
  EXPECT_NEAR(seconds_of_runs(run(99), wait, 0.0045), 99e-6, 1e-12);
  EXPECT_EQ(std::count(calls.begin(), calls.end(), 'w'), 2 + 5) << "five of 0.99 ms";
  calls.clear();
  EXPECT_NEAR(seconds_of_runs(run(600), wait, 0.0035), 600e-6, 1e-12);
  EXPECT_EQ(calls,
            "rwrw"
            "rwrwrwrwrwrw")
      << "until 3.5 ms are over";
}

TEST(Roofline, GpuRunsAreTimedInGroups) {
  const FakeClock clock(std::chrono::nanoseconds(0), false);
  std::string calls;
  int n_waits = 0;
  // The third group is the slowest, the fifth the fastest.
  const double seconds = seconds_of_runs(
      [&](int64_t run) {
        EXPECT_EQ(run, std::count(calls.begin(), calls.end(), 'r'));
        calls += 'r';
        FakeClock::advance(std::chrono::milliseconds(2));
      },
      [&] {
        calls += 'w';
        constexpr int kMore[] = {50, 50, 9, 5, 1};
        FakeClock::advance(std::chrono::milliseconds(kMore[n_waits++]));
      },
      0);
  EXPECT_EQ(calls, "rwrwrwrwrw") << "two that do not count, and three rounds of one run";
  EXPECT_NEAR(seconds, 7e-3, 1e-12);
}

TEST(Roofline, ThePeakIsThatOfTheFormat) {
  Team team(1);
  const MachineSpeed speed(team, 1 << 20);
  const cpu::KernelTable reference = cpu::kernels_for(cpu::Isa::kReference);
  const cpu::KernelTable best = cpu::kernels_for(cpu::best_isa());
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF8E4M3, DType::kI8}) {
    const cpu::Arithmetic by_type[] = {cpu::Arithmetic::kF32, cpu::Arithmetic::kBF16,
                                       cpu::Arithmetic::kInt8};
    const auto activation = static_cast<int>(activation_for(best, type));
    EXPECT_STREQ(peak_of_products(speed, best, type).instruction,
                 speed.best_peak_loop(by_type[activation], best.isa).instruction);
    EXPECT_EQ(peak_of_products(speed, reference, type).type, cpu::Arithmetic::kF32);
  }
  EXPECT_EQ(peak_of_attention(speed, reference).type, cpu::Arithmetic::kF32);
  const bool bf16 = best.attention == cpu::ActivationType::kBF16;
  EXPECT_STREQ(peak_of_attention(speed, best).instruction,
               speed.best_peak_loop(bf16 ? cpu::Arithmetic::kBF16 : cpu::Arithmetic::kF32, best.isa)
                   .instruction);
}

TEST(Prediction, RatesAreMediansOfBursts) {
  Team team(1);
  MachineSpeed speed(team, 1 << 20);
  RatesProbe probe(speed, cpu::Isa::kReference, {{"dense", "fp8", {{1, 0.5}}}});
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(probe.n_bursts(), i);
    probe.burst(0);
  }
  const Machine all = probe.machine(1, 4);
  EXPECT_EQ(all.isa, "reference");
  EXPECT_EQ(all.curves.size(), 1u);
  ASSERT_EQ(all.nodes.size(), 1u);
  EXPECT_EQ(all.nodes[0].cores, 1);
  EXPECT_EQ(all.nodes[0].memory_bytes, machine_info().memory_bytes);
  std::vector<double> reads, ones, floats;
  for (int i = 1; i < 4; ++i) {
    const Machine one = probe.machine(i, i + 1);
    reads.push_back(one.nodes[0].read_bytes_per_second);
    ones.push_back(one.one_thread_read_bytes_per_second);
    floats.push_back(one.peak.fp32);
  }
  EXPECT_EQ(all.nodes[0].read_bytes_per_second, median(reads));
  EXPECT_EQ(all.one_thread_read_bytes_per_second, median(ones));
  EXPECT_EQ(all.peak.fp32, median(floats));
  EXPECT_GT(all.peak.fp32, 0);
  EXPECT_EQ(all.peak.bf16, 0) << "reference kernels have no such instruction";
  EXPECT_EQ(all.peak.int8, 0);
}

// A fifth of the time for each of the five rates, of which the reference kernels have three, and at
// most 50 ms.
TEST(Prediction, BurstsTakeTheirTime) {
  const FakeClock clock(std::chrono::milliseconds(3), false);
  Team team(1);
  MachineSpeed speed(team, 1 << 20);
  RatesProbe probe(speed, cpu::Isa::kReference, {});
  const auto timings_of = [&](double seconds) {
    FakeClock::restart();
    probe.burst(seconds);
    return FakeClock::n_readings() / 2;
  };
  EXPECT_EQ(timings_of(0), 3);
  EXPECT_EQ(timings_of(0.0149), 3);
  EXPECT_EQ(timings_of(0.0151), 3 * 2);
  EXPECT_EQ(timings_of(0.044), 3 * 3);
  EXPECT_EQ(timings_of(0.051), 3 * 4);
  EXPECT_EQ(timings_of(7), 3 * 4);
  const Machine machine = probe.machine(0, 6);
  EXPECT_DOUBLE_EQ(machine.nodes[0].read_bytes_per_second, 64 * (1 << 20) / 3e-3);
  EXPECT_DOUBLE_EQ(machine.one_thread_read_bytes_per_second, 64 * (1 << 20) / 3e-3);
}

// Everything on the CPUs, or the backbone on the first GPU.
TEST(Prediction, IsThatOfThePlanner) {
  const ModelConfig r1 = bench_config("r1");
  const WeightFormats formats = {{DType::kF8E4M3}, {DType::kI8}};
  const Machine with_gpu = machine_from_file(TANDEM_SOURCE_DIR "/machines/2x6454s-4090.json");
  Machine without = with_gpu;
  without.gpus.clear();
  std::vector<int> all(256);
  std::iota(all.begin(), all.end(), 0);
  const auto phase = [&](const Machine& machine, StepShape shape, int stream_from = 0) {
    Placement p;
    p.backbone = formats.backbone;
    p.stages = {{0, 60, {machine.gpus.empty() ? DeviceId{} : DeviceId{0, 0}}, 1}};
    for (int l = 3; l < 61; ++l) p.layers.push_back({l, l, {{all, formats.experts, {DeviceId{}}}}});
    p.stream_from_tokens = stream_from;
    Workload workload;
    workload.context = static_cast<int64_t>(shape.context);
    const RoutingStatistics uniform(r1);
    return predict_step({r1, machine, workload, uniform}, p, shape);
  };
  for (const Machine& machine : {without, with_gpu}) {
    StepPrediction prediction(r1, formats, machine);
    const Phase decode = phase(machine, {4, 1000, false, 1});
    EXPECT_GT(decode.head_seconds, 0);
    EXPECT_DOUBLE_EQ(prediction.decode_seconds({1000, 4}), decode.step_seconds);
    EXPECT_DOUBLE_EQ(prediction.decode_seconds({1000, 4, 2}),
                     phase(machine, {12, 1000, false, 1, 2}).step_seconds);
    EXPECT_DOUBLE_EQ(prediction.shared_decode_seconds(4, 1000),
                     decode.step_seconds - decode.head_seconds);
    EXPECT_DOUBLE_EQ(prediction.prefill_seconds(600, 256),
                     phase(machine, {256, 256, true, 1}).step_seconds +
                         phase(machine, {256, 512, true, 1}).step_seconds +
                         phase(machine, {88, 600, true, 1}).step_seconds);
    EXPECT_DOUBLE_EQ(prediction.prefill_seconds(256, 256),
                     phase(machine, {256, 256, true, 1}).step_seconds);
  }
  const Phase streamed = phase(with_gpu, {512, 512, true, 1}, 512);
  EXPECT_TRUE(streamed.streamed);
  EXPECT_DOUBLE_EQ(StepPrediction(r1, formats, with_gpu).streamed_seconds(512),
                   streamed.step_seconds - streamed.head_seconds);
}

}  // namespace
}  // namespace tandem
