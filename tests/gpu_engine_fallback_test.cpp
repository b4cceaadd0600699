// --device auto: the CPU computes what the GPU does not take, and one line gives the reason;
// --device cuda refuses it.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "gpu_kernels/runtime.h"
#include "tests/error_of.h"
#include "tests/fake_checkpoint.h"
#include "tests/hybrid_placements.h"
#include "tests/setting.h"
#include "tests/whole_models.h"

namespace tandem::test {
namespace {

void expect_fallback(ModelOptions options, const std::string& why) {
  std::vector<std::string> lines;
  options.warn = [&](const std::string& line) { lines.push_back(line); };
  options.device = DeviceChoice::kAuto;
  EXPECT_EQ(LoadedModel(options).device(), "cpu");
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_TRUE(says(lines[0], "running on the CPU: "));
  EXPECT_TRUE(says(lines[0], why));
  EXPECT_EQ(lines[0].find('\n'), std::string::npos);
  options.device = DeviceChoice::kCuda;
  EXPECT_TRUE(says(error_of([&] { LoadedModel model(options); }), why));
  EXPECT_EQ(lines.size(), 1u);
}

TEST(GpuEngineFallback, AGpuThatTakesAllIsUsed) {
  const LimitedGpuMemory memory(kEnough);
  std::string said;
  ModelOptions options = tiny_r1(DeviceChoice::kAuto);
  options.warn = [&](const std::string& line) { said += line; };
  EXPECT_NE(LoadedModel(options).device(), "cpu");
  EXPECT_EQ(said, "");
}

TEST(GpuEngineFallback, TooLittleMemory) {
  const LimitedGpuMemory memory(1'000'000);
  expect_fallback(tiny_r1(DeviceChoice::kAuto), "do not fit with any --ctx");
  ModelOptions options = tiny_r1(DeviceChoice::kAuto);
  EXPECT_EQ(answers(options, 1), answers(tiny_r1(DeviceChoice::kCpu), 1));
}

TEST(GpuEngineFallback, TooLittleMemoryForTheContext) {
  const int64_t for_cuda = gpu::open_gpu().emulated ? 0 : int64_t{300} << 20;
  const LimitedGpuMemory memory(for_cuda + 60'000'000);
  ModelOptions options = tiny_r1(DeviceChoice::kAuto);
  options.context = 200'000;
  expect_fallback(options, "would fit");
}

// The least memory that takes all of the model, or its backbone, does not take the MTP layer, too.
TEST(GpuEngineFallback, AutoLeavesOutTheMtpLayerBeforeTheGpu) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "a GPU's free memory changes by itself";
  std::vector<std::string> notes;
  ModelOptions options = tiny_r1(DeviceChoice::kAuto);
  options.note = [&](const std::string& line) { notes.push_back(line); };
  options.largest_mtp_share = 1;
  const auto device = [&](DraftChoice draft, int64_t bytes, Drafting::Source want) {
    const LimitedGpuMemory memory(bytes);
    options.draft = draft;
    const LoadedModel loaded(options);
    EXPECT_EQ(loaded.drafting().source, want);
    return loaded.device();
  };
  const std::string whole = device(DraftChoice::kAuto, kEnough, Drafting::Source::kMtp);
  const auto least_for = [&](const auto& is_wanted) {
    int64_t enough = kEnough, less = 0;
    while (enough - less > 20'000) {
      const int64_t middle = (enough + less) / 2;
      const bool fits = is_wanted(device(DraftChoice::kLookup, middle, Drafting::Source::kLookup));
      (fits ? enough : less) = middle;
    }
    return enough;
  };
  const auto expect_without_mtp = [&](int64_t bytes, const std::string& want) {
    notes.clear();
    EXPECT_EQ(device(DraftChoice::kAuto, bytes, Drafting::Source::kLookup), want);
    ASSERT_EQ(notes.size(), 1u);
    EXPECT_EQ(notes[0],
              "the layer for multi-token prediction is not used: memory is too small for it");
  };
  expect_without_mtp(least_for([&](const std::string& of) { return of == whole; }), whole);
  expect_without_mtp(least_for([](const std::string& of) { return of != "cpu"; }),
                     whole + ", experts also on the cpu");
}

TEST(GpuEngineFallback, NoGpu) {
  const LimitedGpuMemory memory(0);
  expect_fallback(tiny_r1(DeviceChoice::kAuto), "no NVIDIA GPU can be used");
}

TEST(GpuEngineFallback, ExpertsInAnotherFormat) {
  const LimitedGpuMemory memory(kEnough);
  ModelOptions options = tiny_r1(DeviceChoice::kAuto);
  options.experts = weight_format("int8");
  expect_fallback(options, "--experts int8");
}

// The model has more experts than the router's kernel takes.
TEST(GpuEngineFallback, AModelThatTheKernelsDoNotTake) {
  const LimitedGpuMemory memory(kEnough);
  const TempDirectory directory;
  std::ifstream golden(kGolden + "v2_lite/config.json");
  auto json = nlohmann::json::parse(golden);
  json["n_routed_experts"] = 1032;
  json["num_hidden_layers"] = 2;
  directory.write("config.json", json.dump());
  write_checkpoint(directory.path(), tensors_of(ModelConfig::from_directory(directory.path())), 1);
  ModelOptions options = tiny_r1(DeviceChoice::kAuto);
  options.directory = directory.path();
  expect_fallback(options, "1032 experts");
}

// A GPU that shares the experts with the CPU would wait forever in the first step.
TEST(GpuEngineFallback, LaunchesThatWait) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "CUDA reads CUDA_LAUNCH_BLOCKING once";
  const auto device_with = [](int64_t bytes) {  // empty if refused
    const LimitedGpuMemory memory(bytes);
    std::string device;
    error_of([&] { device = LoadedModel(tiny_r1(DeviceChoice::kCuda)).device(); });
    return device;
  };
  int64_t little = 5'000'000;  // the smallest memory that takes a part of the model
  while (device_with(little).empty()) little += 200'000;
  ASSERT_TRUE(says(device_with(little), "experts also on the cpu"));
  const Setting blocking("CUDA_LAUNCH_BLOCKING", "1");
  EXPECT_EQ(device_with(kEnough), "emulated GPU") << "with all of the model";
  {
    const LimitedGpuMemory memory(little);
    expect_fallback(tiny_r1(DeviceChoice::kAuto), "unset CUDA_LAUNCH_BLOCKING");
  }
  {
    const LimitedGpuMemory memory(kEnough);
    ModelOptions options = tiny_r1(DeviceChoice::kAuto);
    std::mt19937 rng(3);
    Placement placement = random_placement(ModelConfig::from_directory(options.directory), rng);
    placement.kv_tokens = options.context;
    const PlacementFile file(placement);
    options.placement = file.path();
    std::string said;
    options.warn = [&](const std::string& line) { said += line; };
    EXPECT_TRUE(says(error_of([&] { LoadedModel model(options); }), "unset CUDA_LAUNCH_BLOCKING"));
    EXPECT_EQ(said, "") << "a placement that the user chose does not fall back";
  }
}

// Experts on the GPU take no host memory.
TEST(GpuEngineFallback, ExpertsAreKeptOnce) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "a GPU's own needs are not known";
  int64_t whole = 0;
  {
    const LimitedGpuMemory memory(0);
    whole = LoadedModel(tiny_r1(DeviceChoice::kCpu)).packed_bytes();
  }
  int n_shared = 0;
  for (int64_t bytes = 5'000'000; bytes < kEnough && n_shared < 3; bytes += 600'000) {
    const LimitedGpuMemory memory(bytes);
    std::unique_ptr<LoadedModel> loaded;
    error_of([&] { loaded = std::make_unique<LoadedModel>(tiny_r1(DeviceChoice::kCuda)); });
    if (!loaded || !says(loaded->device(), "experts also on the cpu")) continue;
    EXPECT_LT(loaded->packed_bytes(), whole) << bytes;
    ++n_shared;
  }
  EXPECT_GE(n_shared, 2);
}

// A placement that the user chose does not fall back to the CPU.
TEST(GpuEngineFallback, APlacementOnTheGpuDoesNotFallBack) {
  std::mt19937 rng(1);
  ModelOptions options = tiny_r1(DeviceChoice::kAuto);
  options.directory = kGolden + "v3_fp8";
  options.context = kContext;
  const PlacementFile file(random_placement(ModelConfig::from_directory(options.directory), rng));
  options.placement = file.path();
  std::string said;
  options.warn = [&](const std::string& line) { said += line; };
  const LimitedGpuMemory memory(1'000'200'000);  // 200 KB beside the driver's share
  EXPECT_TRUE(says(error_of([&] { LoadedModel model(options); }), "host0.gpu0 holds 1.00 GB"));
  EXPECT_EQ(said, "");
}

}  // namespace
}  // namespace tandem::test
