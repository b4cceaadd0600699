// Chunks, batch compositions and pages must not change the engine's results on a GPU, real or
// emulated, and its tokens are the CPU engine's over many steps of changing batches.
#include <gtest/gtest.h>

#include <algorithm>

#include "gpu_kernels/runtime.h"
#include "ops/cuda_batch.h"
#include "tests/changing_batches.h"
#include "tests/check_close.h"
#include "tests/whole_models.h"

namespace tandem::test {
namespace {

class Loaded : public LoadedModel, public Conversations {
 public:
  Loaded(const ModelOptions& options, unsigned seed, int n)
      : LoadedModel(options), Conversations(LoadedModel::model(), cache(), seed, n) {}
};

ModelOptions golden_on(DeviceChoice device, const std::string& family,
                       AttentionForm form = AttentionForm::kAuto) {
  return {.directory = kGolden + family,
          .device = device,
          .n_threads = 1,
          .context = 1024,
          .max_logits = 16,
          .attention = form};
}

// Lists of a micro-batch are parts of the step's, and each is found where its own numbers are.
TEST(CudaBatch, FindsTheListsOfAPartOfTheBatch) {
  const std::vector<int32_t> tokens = {7, 8, 9, 10}, positions = {3, 40, 5, 6}, rows = {0, 1, 3},
                             hidden = {2, 1, 0, 3}, pages = {4, 2};
  const std::vector<Sequence> sequences = {{0, 1, 4, pages}, {1, 1, 41, pages}, {2, 2, 7, pages}};
  gpu::Stream stream;
  CudaBatch on_gpu(8, 2);
  on_gpu.upload({.tokens = tokens,
                 .positions = positions,
                 .sequences = sequences,
                 .logit_rows = rows,
                 .hidden_rows = hidden},
                stream);
  for (const auto* const list : {&tokens, &positions, &rows, &hidden})
    for (size_t first = 0; first < list->size(); ++first) {
      const std::span<const int32_t> part = std::span(*list).subspan(first);
      std::vector<int32_t> got(part.size());
      stream.copy(on_gpu.on_gpu(part), std::ssize(got) * 4, got.data());
      stream.wait();
      EXPECT_TRUE(std::ranges::equal(got, part)) << "from " << part[0];
    }
}

TEST(GpuEngineBatches, AHundredStepsGiveTheCpusTokens) {
  constexpr int kSequences = 3;
  Loaded cpu(golden_on(DeviceChoice::kCpu, "v2_lite"), 1, kSequences),
      gpu(golden_on(DeviceChoice::kCuda, "v2_lite"), 2, kSequences);
  const Followed seen =
      follow(cpu, gpu,
             {.seed = 11,
              .n_sequences = kSequences,
              .n_steps = 100,
              .end = 80,
              .out_of = 2,
              .prompt = [&](std::mt19937& rng) { return random_prompt(rng, cpu.vocab()); }});
  EXPECT_GE(seen.n_decoded, 120);
  EXPECT_LE(seen.n_far, seen.n_rows / 50);
  EXPECT_LE(seen.n_near, seen.n_rows / 50);
}

// A trained model has few near ties.
TEST(GpuEngineBatches, StepsOfTinyR1GiveTheCpusTokens) {
  constexpr int kSequences = 2;
  const auto options = [](DeviceChoice device) {
    ModelOptions o = tiny_r1(device);
    o.context = 512;
    return o;
  };
  Loaded cpu(options(DeviceChoice::kCpu), 1, kSequences),
      gpu(options(DeviceChoice::kCuda), 2, kSequences);
  const Sums sums(options(DeviceChoice::kCpu).directory);
  const Followed seen = follow(cpu, gpu,
                               {.seed = 5,
                                .n_sequences = kSequences,
                                .n_steps = 30,
                                .end = 120,
                                .out_of = 4,
                                .prompt = std::ref(sums),
                                .last_tokens = sums.last_tokens()});
  EXPECT_GE(seen.n_decoded, 25);
  EXPECT_LE(seen.n_far, 1);
  EXPECT_LE(seen.n_near, 1);
}

// The host prepares the next chunk while the GPU still computes earlier ones.
TEST(GpuEngineBatches, ChunksWithoutLogitsGiveTheSameBits) {
  constexpr int kChunk = 9, kChunks = 6;
  Loaded gpu(golden_on(DeviceChoice::kCuda, "v2_lite"), 3, 1);
  std::mt19937 rng(7);
  std::vector<std::vector<int32_t>> chunks(kChunks, std::vector<int32_t>(kChunk));
  for (auto& chunk : chunks)
    for (int32_t& token : chunk) token = static_cast<int32_t>(rng() % gpu.vocab());
  std::vector<std::vector<float>> waited;
  for (const auto& chunk : chunks) waited = gpu.step({{0, chunk}});
  gpu.forget(0);
  for (int i = 0; i + 1 < kChunks; ++i) gpu.step_without_logits({{0, chunks[i]}});
  expect_same_bits(gpu.step({{0, chunks.back()}}), waited);
}

struct Case {
  std::string family;
  AttentionForm form;
  double bound;  // relative to the largest logit
};

class GpuInvariance : public testing::TestWithParam<Case> {
 protected:
  GpuInvariance() {
    // No near tie of the router: a CPU that multiplies in float chooses the same experts.
    for (int i = 0; i < 80; ++i) prompt_.push_back((i * 37 + 13) % 128);
  }
  std::unique_ptr<Loaded> load(unsigned seed) const {
    return std::make_unique<Loaded>(
        golden_on(DeviceChoice::kCuda, GetParam().family, GetParam().form), seed, 2);
  }
  std::vector<int32_t> part(int first, int n) const {
    return {prompt_.begin() + first, prompt_.begin() + first + n};
  }
  // Logits after each piece of the prompt and after each of some further tokens. With `company` a
  // second sequence takes part in every step.
  std::vector<std::vector<float>> rows(Loaded& on, const std::vector<int>& pieces, bool company) {
    std::vector<std::vector<float>> all;
    const auto step = [&](const std::vector<int32_t>& tokens) {
      std::vector<Conversations::Part> parts;
      if (company) parts.push_back({1, {tokens[0], 3}});
      parts.push_back({0, tokens});
      all.push_back(on.step(parts).back());
    };
    int done = 0;
    for (const int n : pieces) {
      step(part(done, n));
      done += n;
    }
    for (int i = 0; i < 2; ++i) step({i * 11});
    on.forget(0);
    on.forget(1);
    return all;
  }
  // The rows' largest differences, over the largest number of each, in ascending order.
  static std::vector<double> differences(const std::vector<std::vector<float>>& got,
                                         const std::vector<std::vector<float>>& want) {
    EXPECT_EQ(got.size(), want.size());
    std::vector<double> all;
    for (size_t i = 0; i < got.size(); ++i)
      all.push_back(largest_difference(got[i], want[i]) / largest(want[i]));
    std::ranges::sort(all);
    return all;
  }
  static double furthest(const std::vector<std::vector<float>>& got,
                         const std::vector<std::vector<float>>& want) {
    return differences(got, want).back();
  }

  std::vector<int32_t> prompt_;
};

const std::vector<int> kPieces = {66, 1, 13};

TEST_P(GpuInvariance, ChunksBatchesAndPages) {
  const auto on = load(1), elsewhere = load(9);
  const auto alone = rows(*on, kPieces, false), together = rows(*on, kPieces, true);
  expect_same_bits(rows(*elsewhere, kPieces, true), together);  // pages with old contents as well
  on->step({{0, part(0, 65)}});
  elsewhere->step({{0, part(0, 65)}});
  EXPECT_NE(on->pages(0), elsewhere->pages(0));
  on->forget(0);

  auto whole = rows(*on, {80}, false);
  for (const int n : {67, 66}) {  // ends of the chunks
    whole.insert(whole.begin(), on->step({{0, part(0, n)}})[0]);
    on->forget(0);
  }
  const double by_chunks = furthest(alone, whole), by_company = furthest(together, alone);
  std::printf("%s: chunks %.2g, company %.2g of the largest logit\n", GetParam().family.c_str(),
              by_chunks, by_company);
  Loaded cpu(golden_on(DeviceChoice::kCpu, GetParam().family, GetParam().form), 1, 2);
  // Real GPUs truncate sums within an mma. Random experts' scores may be so close that they choose
  // another one in a row.
  const auto apart = differences(alone, rows(cpu, kPieces, false));
  const size_t n_others = gpu::open_gpu().emulated ? 0 : 1;
  EXPECT_LT(apart[apart.size() - 1 - n_others], 2e-2) << "the CPU's, past the end of a page";
  EXPECT_LT(by_chunks, GetParam().bound);
  EXPECT_LT(by_company, GetParam().bound);
}

INSTANTIATE_TEST_SUITE_P(Families, GpuInvariance,
                         testing::Values(Case{"v3_1_fp8", AttentionForm::kAbsorbed, 1e-3},
                                         Case{"v2_lite", AttentionForm::kAbsorbed, 1e-3},
                                         Case{"v2_lite", AttentionForm::kNaive, 1e-3}),
                         [](const auto& info_of) {
                           const Case& c = info_of.param;
                           return c.family +
                                  (c.form == AttentionForm::kNaive ? "_naive" : "_absorbed");
                         });

}  // namespace
}  // namespace tandem::test
