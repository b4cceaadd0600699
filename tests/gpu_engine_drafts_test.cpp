// Drafts with the backbone on a GPU, real or emulated: logits of layers for multi-token prediction,
// answers that drafts do not change, and decode steps of several tokens per sequence as recorded
// graphs.
#include "cli/conversation.h"
#include "cli/options.h"
#include "ops/cuda_device.h"
#include "tests/hybrid_placements.h"
#include "tests/mtp_logits.h"
#include "tests/whole_models.h"
#include "text/chat_format.h"

namespace tandem::test {
namespace {

class MtpOnGpu : public testing::TestWithParam<const char*> {};

// Within the bound of the main logits on a GPU (gpu_engine_test).
TEST_P(MtpOnGpu, GoldenLogits) {
  const LimitedGpuMemory memory(kEnough);
  const std::string directory = kGolden + GetParam();
  const GoldenFile golden(directory + "/golden.safetensors");
  LoadedModel loaded({.directory = directory,
                      .device = DeviceChoice::kCuda,
                      .n_threads = 1,
                      .context = 256,
                      .max_logits = 200,
                      .draft = DraftChoice::kMtp});
  EXPECT_GE(compare_with_golden(loaded, golden, directory.ends_with("v3_fp8") ? 70 : 9, 2e-2), 19);
}

INSTANTIATE_TEST_SUITE_P(Families, MtpOnGpu, testing::Values("v3_fp8", "v3_1_fp8"),
                         [](const auto& info_of) { return std::string(info_of.param); });

struct Answered {
  std::vector<std::vector<int32_t>> tokens;
  int n_accepted = 0, n_rejected = 0, n_recorded = 0;
};

// Answers to questions, three at a time: the even ones are greedy, the odd ones sampled with
// penalties.
Answered answered(const ModelOptions& options, int n_questions) {
  LoadedModel loaded(options);
  const Tokenizer tokenizer = Tokenizer::from_directory(options.directory);
  const auto sample = [](int i, SamplingParams& sampling) {
    sampling.temperature = i % 2 == 0 ? 0 : 0.8f;
    sampling.presence_penalty = i % 4 == 1 ? 0.5f : 0;
    sampling.seed = static_cast<uint64_t>(i);
  };
  Engine engine = {loaded.model(),
                   loaded.cache(),
                   vocabulary_of(tokenizer, loaded.config().vocab),
                   loaded.context(),
                   {.max_running = 3, .drafting = loaded.drafting()}};
  Answered all;
  for (const Completion& c :
       complete(engine, questions(options.directory, tokenizer, n_questions, sample))) {
    all.tokens.push_back(c.tokens);
    all.n_accepted += c.accepted_drafts;
    all.n_rejected += c.rejected_drafts;
  }
  if (const auto* device = dynamic_cast<CudaDevice*>(&loaded.model().device()))
    all.n_recorded = device->n_recorded();
  return all;
}

ModelOptions drafting(DraftChoice draft, int n) {
  ModelOptions options = tiny_r1(DeviceChoice::kCuda);
  options.max_logits = 32;
  options.draft = draft;
  options.draft_tokens = n;
  return options;
}

TEST(GpuDrafts, AnswersAreThoseWithoutDrafts) {
  const LimitedGpuMemory memory(kEnough);
  const Answered want = answered(drafting(DraftChoice::kOff, 0), 3);
  EXPECT_EQ(want.n_accepted + want.n_rejected, 0);
  struct Drafts {
    DraftChoice draft;
    int n, n_questions;
  };
  for (const auto& [draft, n, n_questions] : {Drafts{DraftChoice::kMtp, 1, 3},
                                              {DraftChoice::kMtp, 3, 2},
                                              {DraftChoice::kLookup, 4, 1},
                                              {DraftChoice::kAuto, 2, 1}}) {
    SCOPED_TRACE(testing::Message() << name_of(draft) << ", " << n << " drafts");
    const Answered got = answered(drafting(draft, n), n_questions);
    EXPECT_EQ(got.tokens, std::vector(want.tokens.begin(), want.tokens.begin() + n_questions));
    if (draft == DraftChoice::kMtp) {
      EXPECT_GE(got.n_accepted, 3 * n_questions);
      EXPECT_GE(n == 1 ? got.n_accepted : 1, n == 1 ? 10 * got.n_rejected : 0);
      EXPECT_GT(got.n_recorded, want.n_recorded);
      ModelOptions on_cpu = drafting(draft, n);
      on_cpu.device = DeviceChoice::kCpu;
      EXPECT_NEAR(got.n_accepted, answered(on_cpu, n_questions).n_accepted, 2) << "the same drafts";
    }
  }
}

// The layer begins with the hidden states of the model, or applied again with its own. The CPU
// computes in float: the bound is for the GPU's rounding alone.
TEST(GpuDrafts, RecordedStepsOfTheLayerReadTheirHiddenStates) {
  const LimitedGpuMemory memory(kEnough);
  ModelOptions options = drafting(DraftChoice::kMtp, 2);
  const auto logits = [&](DeviceChoice device, int* n_recorded) {
    options.device = device;
    options.isa = cpu::Isa::kReference;
    LoadedModel loaded(options);
    const std::vector<int32_t> tokens = {11, 12, 13, 14}, next = {12, 13, 14, 15};
    auto rows = mtp_logits(loaded, tokens, next, 1);  // the last step is replayed
    rows.push_back(applied_again(loaded, 4, 16, 1));
    rows.push_back(applied_again(loaded, 5, 17, 1));
    if (n_recorded) *n_recorded = dynamic_cast<CudaDevice&>(loaded.model().device()).n_recorded();
    return rows;
  };
  int n_recorded = 0;
  const auto want = logits(DeviceChoice::kCpu, nullptr);
  const auto got = logits(DeviceChoice::kCuda, &n_recorded);
  for (size_t i = 0; i < want.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "draft " << i);
    expect_close(got[i], want[i], 2e-2 * largest(want[i]));
  }
  EXPECT_EQ(n_recorded, 3) << "a token of the model; the layer with either hidden states";
}

// Drafts give steps of many sizes.
TEST(GpuDrafts, TheGraphsUsedLastAreKept) {
  gpu::open_gpu();
  gpu::Stream stream;
  CudaDevice device(stream, true);
  int n_enqueued = 0, n_followed = 0;
  const auto run = [&](int n_logits) {
    const RecordKey key = {nullptr, nullptr, 0, 0, n_logits, {{{1, 1, 1}}}, 1};
    device.run_recorded(
        key, [&] { ++n_enqueued; }, [&] { ++n_followed; });
  };
  for (int i = 0; i < 300; ++i) {
    run(i);
    run(0);
  }
  EXPECT_EQ(n_enqueued, 300);
  EXPECT_EQ(device.n_recorded(), 256);
  run(299);
  run(45);
  EXPECT_EQ(n_enqueued, 300);
  run(44);
  EXPECT_EQ(n_enqueued, 301) << "255 others were used after it";
  EXPECT_EQ(n_followed, 603);
  EXPECT_EQ(device.n_recorded(), 256);
}

// A recording of 6 nodes takes 6 KiB on the emulated GPU.
TEST(GpuDrafts, RecordingsStayWithinTheirMemory) {
  if (!gpu::open_gpu().emulated) GTEST_SKIP() << "a GPU's recordings take what they take";
  gpu::Stream stream;
  gpu::Buffer word(4, gpu::Site::kDevice), mapped(4, gpu::Site::kMapped);
  CudaDevice device(stream, true, 20 << 10);
  int n_enqueued = 0;
  const auto run = [&](int n_logits) {
    const RecordKey key = {nullptr, nullptr, 0, 0, n_logits, {{{1, 1, 1}}}, 1};
    const auto enqueue = [&] {
      ++n_enqueued;
      for (int i = 0; i < 6; ++i) stream.copy(mapped.as<void>(), 4, word.as<void>());
    };
    device.run_recorded(key, enqueue, [] {});
    stream.wait();
  };
  for (int i = 0; i < 4; ++i) run(i);
  EXPECT_EQ(device.n_recorded(), 3) << "18 KiB";
  for (const int kept : {1, 2, 3}) run(kept);
  EXPECT_EQ(n_enqueued, 4);
  run(0);
  run(1);
  EXPECT_EQ(n_enqueued, 6) << "0 displaced 1, which was used least recently";
  EXPECT_EQ(device.n_recorded(), 3);
}

// Experts on both devices, recorded steps in two micro-batches, streamed prompts.
TEST(GpuDrafts, AnswersAreThoseWithoutDraftsWithExpertsOnBoth) {
  const LimitedGpuMemory memory(kEnough);
  ModelOptions options = drafting(DraftChoice::kOff, 0);
  std::mt19937 rng(3);
  Placement placement = random_placement(ModelConfig::from_directory(options.directory), rng);
  placement.kv_tokens = options.context;
  placement.prefill_chunk_tokens = 17;
  placement.micro_batches = 2;
  placement.micro_batches_from_sequences = 2;
  for (const int stream_from : {0, 13}) {
    placement.stream_from_tokens = stream_from;
    const PlacementFile file(placement);
    options = drafting(DraftChoice::kOff, 0);
    options.placement = file.path();
    const Answered want = answered(options, 2);
    options = drafting(DraftChoice::kMtp, 2);
    options.placement = file.path();
    const Answered got = answered(options, 2);
    EXPECT_EQ(got.tokens, want.tokens) << "streamed from " << stream_from << " tokens on";
    EXPECT_GE(got.n_accepted, 8);
    EXPECT_GT(got.n_recorded, want.n_recorded);
  }
}

}  // namespace
}  // namespace tandem::test
