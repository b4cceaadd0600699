// A GPU that is lost during a run: one clear error at any point, no call waits forever, and all
// objects can be destroyed. On the emulated GPU only, because a real one cannot be lost at will.
#include <atomic>
#include <future>
#include <random>
#include <thread>

#include "cli/conversation.h"
#include "engine/engine.h"
#include "gpu_kernels/exchange/signals.h"
#include "tests/hybrid_placements.h"
#include "tests/lost_gpu.h"
#include "tests/whole_models.h"

namespace tandem::test {
namespace {

using gpu::Buffer, gpu::Event, gpu::Site, gpu::Stream;

class GpuEngineLost : public testing::Test {
 protected:
  void SetUp() override {
    if (!gpu::open_gpu().emulated) GTEST_SKIP() << "a GPU that works is not lost";
  }
};

TEST_F(GpuEngineLost, EveryCallReportsIt) {
  const LostAfter lost(2);
  gpu::open_gpu();
  Stream stream;
  Event event, before;
  const Buffer on_gpu(4, Site::kDevice), mapped(4, Site::kMapped);
  std::atomic<int> n_run = 0;
  const gpu::Graph graph = stream.capture([&] { stream.run_on_host([&] { ++n_run; }); });
  stream.run_on_host([&] { ++n_run; });
  stream.record(before);
  EXPECT_EQ(error_of([&] { stream.wait(); }), "no error");
  stream.run_on_host([&] { ++n_run; });
  EXPECT_TRUE(says(error_of([&] { stream.wait(); }), kLost));
  const std::function<void()> calls[] = {
      [&] { stream.wait(); },
      [&] { stream.throw_if_failed(); },
      [&] { stream.copy(on_gpu.as<float>(), 4, mapped.as<float>()); },
      [&] { stream.run_on_host([&] { ++n_run; }); },
      [&] { stream.record(event); },
      [&] { stream.wait_for(before); },
      [&] { before.wait(); },
      [&] { stream.replay(graph); },
      [&] { stream.capture([&] { stream.run_on_host([&] { ++n_run; }); }); },
      [&] { Buffer(4, Site::kDevice); }};
  for (const auto& call : calls) EXPECT_TRUE(says(error_of(call), kLost));
  EXPECT_FALSE(stream.is_recording());
  EXPECT_EQ(n_run, 1) << "nothing runs on a lost GPU";
}

// A stream fails, and another one polls for a CPU that never answers.
TEST_F(GpuEngineLost, NoCallWaitsForever) {
  const LostAfter lost(4);
  gpu::open_gpu();
  Stream polls, fails;
  gpu::SignalToStream never;
  gpu::SignalToHost ready;
  Event event;
  never.await(polls);
  polls.record(event);
  ready.raise(polls);
  for (int i = 0; i < 3; ++i) fails.run_on_host([] {});
  EXPECT_TRUE(says(error_of([&] { ready.await(polls); }), kLost));
  EXPECT_TRUE(says(error_of([&] { event.wait(); }), kLost));
  EXPECT_TRUE(says(error_of([&] { polls.wait(); }), kLost));
}

ModelOptions small_model(DeviceChoice device = DeviceChoice::kCuda) {
  ModelOptions options = tiny_r1(device);
  options.directory = kGolden + "v2_lite";
  return options;
}

Request request_of(int n_prompt, int vocab) {
  Request r;
  for (int t = 0; t < n_prompt; ++t) r.prompt.push_back(t * 7 % vocab);
  r.max_new_tokens = 6;
  r.sampling.temperature = 0;
  return r;
}

// Loads the model, computes prompts in chunks and decodes with recorded steps.
void generate_with(const ModelOptions& options) {
  LoadedModel loaded(options);
  const int vocab = loaded.config().vocab;
  const Tokenizer tokenizer = Tokenizer::from_directory(kRoot + "/models/tiny-r1");
  Engine engine = engine_for(loaded, tokenizer);
  const std::vector<Request> requests = {request_of(20, vocab), request_of(3, vocab)};
  for (const Completion& c : complete(engine, requests)) EXPECT_EQ(c.tokens.size(), 6u);
}

TEST_F(GpuEngineLost, InARun) {
  expect_every_loss_is_said([] { generate_with(small_model()); });
}

TEST_F(GpuEngineLost, WithExpertsOnBoth) {
  const LimitedGpuMemory memory(kEnough);
  std::mt19937 rng(4);
  ModelOptions options = small_model();
  Placement placement = random_placement(ModelConfig::from_directory(options.directory), rng);
  placement.kv_tokens = options.context;
  placement.prefill_chunk_tokens = 9;
  placement.micro_batches = 2;
  for (const int stream_from : {0, 6}) {
    placement.stream_from_tokens = stream_from;
    const PlacementFile file(placement);
    options.placement = file.path();
    expect_every_loss_is_said([&] { generate_with(options); });
  }
}

// All unfinished and all later requests fail with the error, with either way of output.
void serve_until_lost(int64_t n, bool async) {
  SCOPED_TRACE(testing::Message() << "lost at piece " << n);
  // Destroyed last, so that the GPU stays lost while work of the failed step is still queued.
  std::optional<LostAfter> lost;
  LoadedModel loaded(small_model());
  const Tokenizer tokenizer = Tokenizer::from_directory(kRoot + "/models/tiny-r1");
  OutputThread output;
  Engine engine(loaded.model(), loaded.cache(), vocabulary_of(tokenizer, loaded.config().vocab),
                loaded.context(), {.max_running = 2, .output = async ? &output : nullptr});
  lost.emplace(n);
  gpu::open_gpu();
  constexpr int kAnswers = 4;  // two of them are queued
  std::vector<std::string> errors(kAnswers);
  for (int i = 0; i < kAnswers; ++i) {
    EngineRequest r;
    r.request = request_of(5 + i, loaded.config().vocab);
    r.request.max_new_tokens = 200;
    r.on_event = [&, i](const TokenEvent& event) {
      if (event.finish) {
        EXPECT_EQ(*event.finish, FinishReason::kFailed);
      }
      errors[i] += event.error;
      return true;
    };
    engine.submit(std::move(r));
  }
  EXPECT_THROW(engine.run(), RunError);
  output.finish();
  for (const std::string& error : errors) EXPECT_TRUE(says(error, kLost));
  EngineRequest late;
  late.request = request_of(3, loaded.config().vocab);
  EXPECT_TRUE(says(error_of([&] { engine.submit(std::move(late)); }), kLost));
}

TEST_F(GpuEngineLost, AnswersOfAnEngineEndWithTheError) {
  for (const int64_t n : {1, 2, 40, 1001}) serve_until_lost(n, n % 2 == 0);
}

}  // namespace
}  // namespace tandem::test
