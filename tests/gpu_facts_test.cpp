// The messages for machines without a usable GPU, case by case.
#include "gpu_kernels/gpu_facts.h"

#include <gtest/gtest.h>

#include "tests/error_of.h"

namespace tandem::gpu {
namespace {

GpuFacts sound() {
  GpuFacts facts;
  facts.driver = 12040;
  facts.toolkit = 13000;  // newer than the driver, which accepted it
  facts.n_gpus = 1;
  facts.name = "NVIDIA H200";
  facts.major = 9;
  return facts;
}

TEST(WhyNot, AUsableGpuIsAccepted) { EXPECT_EQ(why_not(sound()), ""); }

TEST(OnlyGpu, IsOneOfThoseThatTheProcessMayUse) {
  EXPECT_EQ(only_gpu({}, 0), "0");
  EXPECT_EQ(only_gpu({}, 11), "11");
  EXPECT_EQ(only_gpu("4,2,GPU-8a1f", 0), "4");
  EXPECT_EQ(only_gpu("4,2,GPU-8a1f", 1), "2");
  EXPECT_EQ(only_gpu("4,2,GPU-8a1f", 2), "GPU-8a1f");
  EXPECT_EQ(only_gpu("4,2,GPU-8a1f", 3), "");
  EXPECT_EQ(only_gpu("", 0), "");
  EXPECT_EQ(only_gpu("", 2), "");
  EXPECT_EQ(only_gpu("GPU-8a1f", 0), "GPU-8a1f");
  EXPECT_EQ(only_gpu("GPU-8a1f", 3), "GPU-8a1f") << "each rank has a list of its own";
}

TEST(WhyNot, Fp8NeedsAGpuAndKernelsForIt) {
  GpuFacts facts = sound();
  facts.compiled_for = 89;
  EXPECT_TRUE(has_fp8_mma(facts));
  facts.compiled_for = 80;  // the driver compiled the kernels from PTX
  EXPECT_FALSE(has_fp8_mma(facts));
  facts.major = 8, facts.minor = 9, facts.compiled_for = 89;
  EXPECT_TRUE(has_fp8_mma(facts));
  facts.minor = 6, facts.compiled_for = 86;
  EXPECT_FALSE(has_fp8_mma(facts));
}

// Peaks that NVIDIA publishes, dense BF16 with float sums, and the multiprocessors and highest
// clock of these GPUs. Data sheets round to three digits.
TEST(DatasheetRate, IsThatOfTheDataSheets) {
  struct Published {
    int capability;
    const char* name;
    int n_multiprocessors, megahertz;
    double tera;
  };
  constexpr Published kPublished[] = {
      {80, "NVIDIA A100-SXM4-80GB", 108, 1410, 312},
      {80, "NVIDIA A30", 56, 1440, 165},
      {86, "NVIDIA GeForce RTX 3090", 82, 1695, 71},
      {89, "NVIDIA GeForce RTX 4090", 128, 2520, 165.2},
      {90, "NVIDIA H100 80GB HBM3", 132, 1980, 989.4},
      {90, "NVIDIA H100 PCIe", 114, 1755, 756},
      {90, "NVIDIA H200", 132, 1980, 989.4},
      {90, "NVIDIA GH200 480GB", 132, 1980, 989.4},
      {100, "NVIDIA B200", 148, 1965, 2250},
      {120, "NVIDIA GeForce RTX 5090", 170, 2407, 209.5},
      // Not known: professional GPUs have either of two rates, other chips and boards another one.
      {86, "NVIDIA A10G", 80, 1710, 0},
      {89, "NVIDIA L40S", 142, 2520, 0},
      {87, "Orin", 16, 1300, 0},
      {90, "NVIDIA H20", 78, 1980, 0},
      {90, "NVIDIA H100 NVL", 132, 1785, 0},
      {100, "NVIDIA GB200", 152, 2062, 0},
      {120, "NVIDIA RTX PRO 6000 Blackwell Server Edition", 188, 2617, 0},
      {121, "NVIDIA GB10", 48, 2500, 0}};
  for (const Published& p : kPublished) {
    GpuFacts facts = sound();
    facts.name = p.name;
    facts.major = p.capability / 10;
    facts.minor = p.capability % 10;
    EXPECT_NEAR(datasheet_bf16_ops_per_second(facts, p.n_multiprocessors, p.megahertz * 1000),
                p.tera * 1e12, p.tera * 5e9)
        << p.name;
  }
}

// The message is one line that contains `parts` and the alternative.
void expect_refused(const GpuFacts& facts, std::initializer_list<const char*> parts) {
  const std::string why = why_not(facts);
  EXPECT_EQ(why.find('\n'), std::string::npos) << why;
  for (const char* part : parts) EXPECT_TRUE(says(why, part));
  EXPECT_TRUE(says(why, "use --device cpu"));
}

TEST(WhyNot, NoDriver) { expect_refused({}, {"this machine has no NVIDIA driver", "install one"}); }

TEST(WhyNot, ADriverOlderThanTheToolkit) {
  GpuFacts facts = sound();
  facts.driver = 11080;
  facts.count = GpuFacts::Count::kDriverTooOld;
  facts.n_gpus = 0;
  expect_refused(facts, {"driver supports CUDA 11.8", "built with 13.0", "install a newer driver"});
}

TEST(WhyNot, NoGpu) {
  GpuFacts facts;
  facts.driver = 12040;
  expect_refused(facts, {"the driver finds none", "nvidia-smi"});
  facts.count = GpuFacts::Count::kFailed;
  facts.count_error = "no CUDA-capable device is detected";
  expect_refused(facts, {"no CUDA-capable device is detected", "nvidia-smi"});
  facts.n_gpus = 1;  // the count is ignored when the call failed
  expect_refused(facts, {"no CUDA-capable device is detected"});
}

TEST(WhyNot, AnOldGpu) {
  GpuFacts facts = sound();
  facts.name = "Tesla V100";
  facts.major = 7;
  facts.minor = 5;
  expect_refused(facts, {"Tesla V100 has compute capability 7.5", "8.0 or newer is needed"});
}

TEST(WhyNot, AGpuThatTheProgramWasNotBuiltFor) {
  GpuFacts facts = sound();
  facts.kernels = GpuFacts::Kernels::kForOthers;
  expect_refused(facts,
                 {"built for other GPUs than NVIDIA H200 (compute capability 9.0)", "TANDEM_CUDA"});
  facts.kernels = GpuFacts::Kernels::kPtxTooNew;
  expect_refused(facts, {"supports CUDA 12.4", "PTX of CUDA 13.0", "install a newer driver"});
}

TEST(WhyNot, AFailureNamesItsPlace) {
  const std::string said = failure_text("unknown error", "cudaErrorUnknown", {"x.cpp", 7, "f"});
  EXPECT_TRUE(says(said, "the GPU failed: unknown error (cudaErrorUnknown, at x.cpp:7)"));
  EXPECT_TRUE(says(said, "start the program again, or use --device cpu"));
}

}  // namespace
}  // namespace tandem::gpu
