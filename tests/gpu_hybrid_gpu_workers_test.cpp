// Whole models whose experts workers with a GPU have, real or emulated: golden logits, tiny-r1's
// answers while owners are lost, drafts, and owners that would compute other sums.
#include <gtest/gtest.h>

#include "cli/conversation.h"
#include "gpu_kernels/runtime.h"
#include "loader/expert_workers.h"
#include "tests/check_close.h"
#include "tests/error_of.h"
#include "tests/golden_file.h"
#include "tests/hybrid_placements.h"
#include "tests/lost_gpu.h"
#include "tests/mtp_logits.h"
#include "tests/served_on_gpu.h"
#include "tests/worker_backbones.h"
#include "tests/worker_models.h"

namespace tandem::test {
namespace {

bool is_emulated_gpu() { return gpu::open_gpu().emulated; }

Logits logits_with(const std::vector<std::string>& workers, ModelOptions options,
                   const std::vector<int32_t>& tokens) {
  options.workers.addresses = workers;
  LoadedModel loaded(options);
  return logits_after(loaded, tokens);
}

class GpuWorkerModel : public testing::TestWithParam<std::string> {};

TEST_P(GpuWorkerModel, HasTheGoldenLogits) {
  const std::string directory = kGolden + GetParam();
  const GoldenFile golden(directory + "/golden.safetensors");
  const std::vector<int32_t> tokens = golden.ints("tokens_17");
  const ModelOptions options = {
      .directory = directory, .n_threads = 1, .context = 64, .max_logits = 17};
  const std::vector<float> want = golden.floats("logits_17");
  const auto expect_golden = [&](const Logits& got) {
    std::vector<float> all;
    for (const std::vector<float>& row : got) all.insert(all.end(), row.begin(), row.end());
    ASSERT_GE(all.size(), want.size());
    all.erase(all.begin(), all.end() - std::ssize(want));
    expect_close(all, want, 3e-2 * largest(want));
  };
  const int n = ModelConfig::from_directory(directory).router.n_experts;
  const std::string first = fmt::format("0-{}", n / 2 - 1),
                    last = fmt::format("{}-{}", n / 2, n - 1);
  const Workers one(served_on_gpu(directory, ""), {"auto"});
  const Logits of_one = logits_with(one.addresses, options, tokens);
  expect_golden(of_one);
  {
    const Workers same(served_on_gpu(directory, ""), {"auto", "auto"});
    EXPECT_EQ(logits_with(same.addresses, options, tokens), of_one) << "one shard";
  }
  {
    const Workers halves(served_on_gpu(directory, ""), {first, last});
    expect_golden(logits_with(halves.addresses, options, tokens));
  }
  {
    // The experts of different workers need not be on the same device.
    const Workers on_gpu(served_on_gpu(directory, ""), {last}),
        on_cpu(served(directory, ""), {first});
    expect_golden(logits_with({on_gpu.addresses[0], on_cpu.addresses[0]}, options, tokens));
  }
  if (!is_emulated_gpu()) return;  // the memory of a GPU is what it is
  const LimitedGpuMemory memory(gpu_bytes_for(served_on_gpu(directory, "auto"), n / 2));
  const Workers mixed(served_on_gpu(directory, ""), {"auto", "auto"});
  const Logits of_two = logits_with(mixed.addresses, options, tokens);
  expect_golden(of_two);
  EXPECT_EQ(logits_with({mixed.addresses[0]}, options, tokens), of_two) << "the same places";
}

INSTANTIATE_TEST_SUITE_P(Families, GpuWorkerModel,
                         testing::Values("v3_fp8", "v2_lite", "kimi_k2_thinking"),
                         [](const auto& info_of) { return info_of.param; });

TEST(GpuWorkerModels, HaveExpertsOfDrafts) {
  const std::string directory = kGolden + "v3_fp8";
  ModelOptions options = {.directory = directory,
                          .n_threads = 1,
                          .context = 256,
                          .max_logits = 200,
                          .draft = DraftChoice::kMtp};
  std::vector<int32_t> tokens, next;
  for (int i = 0; i < 20; ++i) {
    tokens.push_back((i * 7 + 3) % 30);
    next.push_back((i * 7 + 10) % 30);
  }
  LoadedModel alone(options);
  const auto want = mtp_logits(alone, tokens, next, 13);
  LoadedExpertsOptions of_worker = served_on_gpu(directory, "auto");
  of_worker.draft = DraftChoice::kMtp;
  const WorkerThread worker(of_worker);
  options.workers.addresses = {worker.address()};
  LoadedModel loaded(options);
  const auto got = mtp_logits(loaded, tokens, next, 13);
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) expect_close(got[i], want[i], 2e-2 * largest(want[i]));
}

// Whichever owner computes: bits of sums, while each of them ends and begins again.
TEST(GpuWorkers, GiveTheSameSumsWhoeverAnswers) {
  Local local;
  for (const bool is_mixed : {false, true}) {
    if (is_mixed && !is_emulated_gpu()) continue;
    const LoadedExpertsOptions of_worker = served_on_gpu(kServedModel, "auto");
    const LimitedGpuMemory memory(is_mixed ? gpu_bytes_for(of_worker, 3) : kEnough);
    Workers workers(of_worker, {"auto", "auto"});
    Lines notes;
    Backbone backbone(local, workers.addresses, {.notes = &notes});
    const auto sums = [&] {
      std::vector<std::vector<float>> all;
      for (int i = 0; i < 6; ++i) {
        Inputs inputs(1 + i * 7, local.dim, i);
        all.push_back(backbone.sums(inputs, 1 + i % 2));
      }
      return all;
    };
    const auto want = sums();
    for (int worker = 0; worker < 2; ++worker) {
      const std::string address = workers.addresses[worker];
      std::thread change([&] { workers.threads[worker].reset(); });
      for (int i = 0; i < 3; ++i) EXPECT_EQ(sums(), want);
      change.join();
      EXPECT_EQ(sums(), want);
      workers.threads[worker] =
          std::make_unique<WorkerThread>(of_worker, ExpertServer::Options{.address = address});
      for (int i = 0; i < 2000 && !backbone.status(worker).is_up; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      ASSERT_TRUE(backbone.status(worker).is_up);
      EXPECT_EQ(backbone.status(worker).n_on_gpu, is_mixed ? 3 : 8);
    }
  }
}

// A worker that has lost its GPU ends with the error, and backbones notice it at once.
TEST(GpuWorkers, EndWithTheirGpu) {
  if (!is_emulated_gpu()) GTEST_SKIP() << "a GPU is not lost as the test wants";
  const std::unique_ptr<Transport> transport = tcp_transport();
  ExpertServer server(*transport, {});
  std::string error;
  std::thread worker([&] {
    LoadedExperts loaded(served_on_gpu(kServedModel, "auto"));
    error = error_of([&] { server.run(loaded.served()); });
  });
  Local local;
  Lines notes;
  Backbone backbone(local, {"127.0.0.1:" + std::to_string(server.port())},
                    {.patience = std::chrono::milliseconds(100),
                     .deadline = std::chrono::seconds(60),
                     .notes = &notes});
  Inputs inputs(5, local.dim, 1);
  backbone.sums(inputs, 1);
  const LostAfter lost(1);
  gpu::open_gpu();
  const std::string failed = error_of([&] { backbone.sums(inputs, 1); });
  worker.join();
  EXPECT_TRUE(says(error, kLost));
  EXPECT_TRUE(says(failed, "experts 0-7 have had no worker for"));
  EXPECT_FALSE(says(failed, "silent")) << "its connection was closed";
}

TEST(GpuWorkersOfTinyR1, AnswerAsOneProcess) {
  const std::vector<std::vector<int32_t>> want = answers(tiny_r1(DeviceChoice::kCpu), 4);
  ModelOptions options = tiny_r1(DeviceChoice::kCpu);
  Workers workers(served_on_gpu(kTinyR1, ""), {"auto", "auto"});
  options.workers.addresses = workers.addresses;
  EXPECT_EQ(while_owners_change(workers, served_on_gpu(kTinyR1, "auto"),
                                [&] { return answers(options, 4); }),
            want);
}

// Owners of one expert compute it on the same kind of device.
TEST(GpuWorkers, AreRefusedWhereOwnersDiffer) {
  if (!is_emulated_gpu()) GTEST_SKIP() << "the memory of a GPU is what it is";
  const std::string directory = kGolden + "v3_fp8";
  const auto with = [&](const std::vector<std::string>& addresses) {
    ModelOptions options = {.directory = directory, .n_threads = 1, .context = 64};
    options.workers.addresses = addresses;
    options.workers.patience = std::chrono::seconds(5);
    return error_of([&] { LoadedModel loaded(options); });
  };
  const WorkerThread cpu(served(directory, "auto")), cpu_last(served(directory, "4-7"));
  const WorkerThread gpu(served_on_gpu(directory, "auto"));
  EXPECT_EQ(with({gpu.address()}), "no error");  // it has loaded, with all the memory
  const auto mixed_of = [&](int n) {
    const LimitedGpuMemory memory(gpu_bytes_for(served_on_gpu(directory, "auto"), n));
    auto worker = std::make_unique<WorkerThread>(served_on_gpu(directory, "auto"));
    EXPECT_EQ(with({worker->address()}), "no error");  // it has loaded
    return worker;
  };
  const auto mixed_4 = mixed_of(4), mixed_3 = mixed_of(3);
  const auto expect_refused = [&](const std::string& a, const std::string& b,
                                  const std::string& experts) {
    EXPECT_TRUE(says(with({a, b}),
                     "both have experts " + experts + ", and would compute different sums (\""))
        << a << b;
  };
  expect_refused(cpu.address(), gpu.address(), "0-7");
  expect_refused(gpu.address(), cpu_last.address(), "4-7");
  expect_refused(cpu.address(), mixed_4->address(), "0-7");
  expect_refused(gpu.address(), mixed_4->address(), "0-7");
  expect_refused(mixed_3->address(), mixed_4->address(), "0-7");
  // These have experts 4 to 7 in memory, and 0 to 3 have one owner.
  EXPECT_EQ(with({mixed_4->address(), cpu_last.address()}), "no error");
  EXPECT_TRUE(says(with({gpu.address(), cpu.address()}),
                   "emulated GPU of compute capability 8.9, experts as stored\" and \"kernels "));
  LoadedExpertsOptions standby = served(directory, std::string(kStandby));
  const WorkerThread of_cpu(standby);
  EXPECT_TRUE(says(with({gpu.address(), of_cpu.address()}),
                   "it is a standby that would compute other sums"));
  EXPECT_EQ(with({cpu.address(), of_cpu.address()}), "no error");
}

TEST(GpuWorkers, DoNotComeBackWithFewerExpertsOnTheirGpu) {
  if (!is_emulated_gpu()) GTEST_SKIP() << "the memory of a GPU is what it is";
  const LoadedExpertsOptions of_worker = served_on_gpu(kServedModel, "auto");
  auto memory = std::make_unique<LimitedGpuMemory>(gpu_bytes_for(of_worker, 4));
  auto worker = std::make_unique<WorkerThread>(of_worker);
  const std::string address = worker->address();
  Local local;
  Backbone backbone(local, {address}, {.patience = std::chrono::milliseconds(200)});
  worker.reset();
  memory.reset();
  memory = std::make_unique<LimitedGpuMemory>(gpu_bytes_for(of_worker, 3));
  worker = std::make_unique<WorkerThread>(of_worker, ExpertServer::Options{.address = address});
  Inputs inputs(3, local.dim, 1);
  std::string said;
  for (int i = 0; i < 100 && said.find("on its GPU") == said.npos; ++i)
    said = error_of([&] { backbone.sums(inputs, 1); });
  EXPECT_TRUE(says(said, "it has experts 0-2 on its GPU, and had 0-3 there before"));
}

}  // namespace
}  // namespace tandem::test
